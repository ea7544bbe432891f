"""Which apps bid, and which app gets which GPU: the only decisions in which Themis and its baselines differ.

A policy sees what the apps need and chooses the apps that bid; with their bids it decides who gets which GPU.
Everything else the arbiter does in the same way for every policy. The baselines are in
`benchmarks.shared_cluster.baselines`.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from themis_bridge.auction import Bid, clear_auction
from themis_bridge.locality import Gpu, cut_in_gangs, whole_gangs
from themis_bridge.messages import Report
from themis_bridge.settings import NO_QUOTA
from themis_bridge.winner_determination import EQUAL

#: An app without any GPU has waited long if its rho would be at least this even if it had all GPUs that it could use
#: from now on. That is so at the latest when this fraction of its fair time T_id has passed. Such an app
#: is starving. Seen where apps were more than GPUs: some had none for two hundred hours.
LONG_WAIT = 0.04
#: Bytes of a lot. No two of a thousand apps have the same one.
LOT_BYTES = 8

#: Of two apps that are equally far behind, the one with the smaller tie-break comes first.
TieBreak = tuple[float, bytes]


def tie_break(app: str, joined: float, draw: float) -> TieBreak:
    """The order of apps that are equal in all else: by arrival, and then by a lot that no app can choose.

    By name, an app that calls itself "a" would win every tie. The lot is a hash that depends on the number of the draw,
    and on the time of arrival to its last bit, which no app knows when it chooses its name.
    ``joined``: seconds on the arbiter's clock. ``draw``: another number in each draw, such as that of the round.
    """
    return joined, hashlib.blake2b(f"{draw!r}/{joined!r}/{app}".encode(), digest_size=LOT_BYTES).digest()


def behind(holds: bool, rho: float, best: float, tie: TieBreak) -> tuple[bool, float, TieBreak]:
    """Smaller for an app that is further behind; apps without any GPU come before all others.

    Without any GPU rho is practically infinite and says nothing. Of such apps, the one that has waited longest relative
    to its work is the one whose rho would be worst if it had all GPUs that it could use from now on (``best``).
    """
    return holds, -(rho if holds else best), tie


@dataclass(frozen=True)
class Need:
    """What an app needs, by the arbiter's own count.

    rho: its finish-time fairness if it keeps the GPUs that it holds, multiplied by its weight and divided by its doubt.
    useful: the most GPUs that it could use now, including those that it holds.
    gang: how many of its GPUs should be on one machine.
    best: its rho if it had all GPUs that it could use from now on.
    left: seconds until it would end with all those GPUs.
    report: what it said itself; None: only the above is known.
    together: how many GPUs of one machine it needs at once, see `messages.Heartbeat`.
    tie: its place among apps that are equal in all else.
    """

    rho: float
    useful: int
    gang: int = 1
    best: float = 0.0
    left: float = 0.0
    report: Report | None = None
    together: int = 1
    tie: TieBreak = (0.0, b"")


@dataclass
class Situation:
    """What a policy decides on."""

    #: App -> what it needs.
    needs: Mapping[str, Need]
    #: App -> the GPUs that it keeps whatever is decided; none of them is on offer.
    held: Mapping[str, tuple[Gpu, ...]]
    #: GPU id -> the GPU, for all on offer.
    offer: Mapping[str, Gpu]
    #: GPU id -> the app that holds it until its lease ends, for those on offer that are leased.
    holder: Mapping[str, str]
    #: App -> the most GPUs that it may hold, for apps whose user has a quota.
    quota: Mapping[str, int]

    def wants(self, app: str) -> int:
        """How many GPUs of the offer the app could use beyond those that it keeps, in whole gangs."""
        held, together = self.held[app], self.needs[app].together
        more = self.needs[app].useful - whole_gangs(held, together)
        room = max(0, min(more, self.quota.get(app, NO_QUOTA) - len(held)))
        return min(room - room % together, whole_gangs(self.offer.values(), together))


class Policy(Protocol):
    """See the module. ``recalls``: whether leases are recalled for an app that joins, see `preemption`."""

    recalls: bool

    def bidders(self, situation: Situation) -> list[str]:
        """The apps that bid; empty if the policy needs no bids."""

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> dict[str, str]:
        """GPU -> the app that gets it. ``bids``: of those bidders."""


@dataclass
class Themis:
    """The partial-allocation auction among the apps with the worst rho.

    At most a ``1 - f`` share of the apps that want GPUs bids, and at least one app. In addition, counted from the
    worst, no app bids after the demands before it cover the offer. If twenty apps of one GPU each bid for two GPUs,
    each winner would pay with all that it won for what the others lose, and the worst would get nothing, round after
    round. And an app that wants the whole offer bids alone, so that GPUs on one machine stay together.

    So most auctions have one bidder, who pays nothing, and the rule is in effect an order by rho with recall and
    renewal; `benchmarks.policies` shows that such an order is as good. Nothing in it makes the truth pay: that is left
    to the checks of `app_record`.

    recalls: whether leases are recalled for an app that joins, see `preemption`.
    renews: whether holders keep GPUs, see `renewed`.
    """

    f: float
    recalls: bool = True
    renews: bool = True

    def bidders(self, situation: Situation) -> list[str]:
        wanting = worst_first(situation)
        most = max(1, math.ceil((1 - self.f) * len(wanting) - EQUAL))
        wanted = list(accumulate(situation.wants(app) for app in wanting))
        enough = bisect_left(wanted, len(situation.offer)) + 1
        return wanting[: min(most, enough)]

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> dict[str, str]:
        ordered = sorted(bids.values(), key=lambda bid: situation.needs[bid.app].tie)
        clearing = clear_auction(ordered, situation.offer)
        grants = {gpu: app for app, gpus in clearing.allocation.items() for gpu in gpus}
        grants |= share_leftover(situation, grants, bids)
        return renewed(situation, grants) if self.renews else grants


def worst_first(situation: Situation) -> list[str]:
    """The apps that want GPUs, the one that is furthest behind first, see `behind`."""
    holding = {app for app, held in situation.held.items() if held} | set(situation.holder.values())

    def key(app: str) -> tuple[bool, float, TieBreak]:
        need = situation.needs[app]
        return behind(app in holding, need.rho, need.best, need.tie)

    return sorted((app for app in situation.needs if situation.wants(app) > 0), key=key)


def whole(situation: Situation, grants: Mapping[str, str]) -> dict[str, str]:
    """The grants without the GPUs that would be of no use to their winner, because its gang is not whole.

    Some GPUs of a gang may stay with their holders. Then the others stay, too; those that are free are offered again.
    """
    useless = _useless(situation, grants)
    stay = {gpu: app for gpu in useless if (app := situation.holder.get(gpu, "")) in situation.needs}
    final = {gpu: app for gpu, app in grants.items() if gpu not in useless} | stay
    for gpu in _useless(situation, final):
        del final[gpu]
    return final


def _useless(situation: Situation, grants: Mapping[str, str]) -> list[str]:
    """The GPUs beyond whole gangs that apps would get which need gangs."""
    useless: list[str] = []
    for app, need in situation.needs.items():
        # What it holds already stays in the gang that it is in.
        own = [(situation.holder.get(gpu) != app, gpu) for gpu, winner in grants.items() if winner == app]
        _, torn = cut_in_gangs({gpu: situation.offer[gpu].machine for _, gpu in sorted(own)}, need.together)
        useless += torn
    return useless


def renewed(situation: Situation, grants: Mapping[str, str]) -> dict[str, str]:
    """The grants with each GPU left to its holder whose loss would harm him more than the gain would help the winner.

    Only a few GPUs are auctioned at a time and only a few apps bid, so most holders cannot defend their GPUs. Without
    this rule two equal apps would take a GPU from each other for ever. A GPU stays if its holder would be worse off
    without it than the winner is now. The holder's last GPU never stays, so that apps take turns where there are more
    apps than GPUs. GPUs of one machine stay or go by whole gangs, because half a gang is slow for both apps.
    """
    final = dict(grants)
    count = Counter(situation.holder.values())
    for app, gpus in situation.held.items():
        count[app] += len(gpus)
    rooms = {app: situation.wants(app) for app in situation.needs}
    for app in grants.values():
        rooms[app] = rooms.get(app, 0) - 1
    changing: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for gpu, winner in sorted(grants.items()):
        holder = situation.holder.get(gpu)
        if holder is not None and holder != winner and holder in situation.needs:
            changing[holder, winner, situation.offer[gpu].machine].append(gpu)
    for (holder, winner, _), left in changing.items():
        theirs, other = situation.needs[holder], situation.needs[winner]
        while left:
            size = min(len(left), max(theirs.gang, other.gang))
            if size >= count[holder]:
                size = 1
            part, left = left[:size], left[size:]
            keeps = count[holder] - size
            keeps -= keeps % theirs.together
            worse = keeps and theirs.rho * count[holder] / keeps > other.rho
            if worse and rooms[holder] >= size:
                final.update(dict.fromkeys(part, holder))
                rooms[holder] -= size
                rooms[winner] += size
            else:
                count[holder] -= size
    return final


def share_leftover(situation: Situation, grants: Mapping[str, str], bids: Mapping[str, Bid]) -> dict[str, str]:
    """Give the GPUs on offer that are in no grant to apps; returns GPU -> app.

    They go, one gang at a time and on one machine where possible,

    1. to apps that would hold nothing and have waited long (`LONG_WAIT`): one gang each, worst first. An app that can
       use a single GPU and bids beside a larger app wins the GPU but pays with all of it, so that without this rule it
       could stay without a GPU round after round;
    2. to apps that did not bid: the one with most work left first;
    3. to apps that did bid: worst rho first.

    The paper draws lots among the apps that did not bid. By work left, the last app of the cluster ends earlier, and
    the same app gets the GPUs again in the next round, so that less moves. An app that overstates its work wins
    leftovers but loses auctions, which costs it more (`benchmarks.liars`).
    """
    free: dict[str, list[str]] = defaultdict(list)
    for gpu in sorted(situation.offer.keys() - grants.keys()):
        free[situation.offer[gpu].machine].append(gpu)
    got = Counter(grants.values())
    given: dict[str, str] = {}

    def give(app: str) -> bool:
        """Give it one gang. Returns whether there was one that is of use to it."""
        size = min(situation.needs[app].gang, situation.wants(app) - got[app])
        near = Counter(gpu.machine for gpu in situation.held[app])
        near.update(situation.offer[gpu].machine for gpu, holder in {**grants, **given}.items() if holder == app)
        own = Counter(machine for machine, gpus in free.items() for gpu in gpus if situation.holder.get(gpu) == app)
        # Preferred in this order: a machine where a whole gang fits; one that has most of the app's GPUs, so that a
        # scattered app moves together lease by lease; one where the app holds GPUs on offer; the tightest fit.
        machine = min(
            free, key=lambda m: (len(free[m]) < size, -near[m], -min(size, own[m]), abs(len(free[m]) - size), m)
        )
        chosen = sorted(free[machine], key=lambda gpu: (situation.holder.get(gpu) != app, gpu))[:size]
        if len(chosen) % situation.needs[app].together:
            return False
        for gpu in chosen:
            given[gpu] = app
            got[app] += 1
            free[machine].remove(gpu)
        if not free[machine]:
            del free[machine]
        return True

    waited = [app for app, need in situation.needs.items() if need.best >= LONG_WAIT]
    empty = [app for app in waited if not situation.held[app] and not got[app]]
    for app in sorted(empty, key=lambda app: (-situation.needs[app].best, situation.needs[app].tie)):
        if free and situation.wants(app) > 0:
            give(app)
    others = situation.needs.keys() - bids.keys()
    longest = sorted(others, key=lambda app: (-situation.needs[app].left, situation.needs[app].tie))
    for app in longest + sorted(bids, key=lambda app: (-situation.needs[app].rho, situation.needs[app].tie)):
        while free and situation.wants(app) > got[app] and give(app):
            pass
    return given
