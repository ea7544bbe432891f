"""Who bids and who gets what: the one question in which Themis and its baselines differ.

A policy sees the apps' reports, says whom to offer the GPUs to, and, with their bids, who gets which. The arbiter does
all the rest alike for every policy. Baselines are in `themis_bridge.twin.baselines`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Protocol

from themis_bridge.auction import Bid, Clearing, clear_auction
from themis_bridge.locality import Gpu
from themis_bridge.messages import Report
from themis_bridge.settings import NO_QUOTA

#: Of what nobody won, an app that would hold nothing gets its gang first if its rho would be this or more even with all
#: that it could use from now on: a 25th of the time of its own share has passed.
WAITED = 0.04


@dataclass
class Situation:
    """What a policy decides on.

    ``held``: GPUs that each app keeps, those on offer not among them. ``holder``: who has a GPU on offer until its
    lease ends. ``quota``: by app.
    """

    reports: Mapping[str, Report]
    held: Mapping[str, tuple[Gpu, ...]]
    offer: Mapping[str, Gpu]
    holder: Mapping[str, str]
    quota: Mapping[str, int]

    def wants(self, app: str) -> int:
        """How many more GPUs the app could use."""
        return min(self.reports[app].useful, self.quota.get(app, NO_QUOTA)) - len(self.held[app])


@dataclass
class Outcome:
    """``grants``: GPU -> app. ``leftovers``: those of them that were not won. ``clearing``: of an auction."""

    grants: dict[str, str] = field(default_factory=dict)
    leftovers: frozenset[str] = frozenset()
    clearing: Clearing | None = None


class Policy(Protocol):
    """See the module. ``recalls``: leases are recalled for an app that comes."""

    recalls: ClassVar[bool]

    def bidders(self, situation: Situation) -> list[str]:
        """Apps to offer the GPUs to; empty when it needs no bids."""

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> Outcome:
        """Who gets what. ``bids``: of those bidders that answered in time, each one checked."""


@dataclass
class Themis:
    """The partial-allocation auction among the worst ``1 - f`` of the apps; of these no more than want all there is.

    Were twenty apps of one GPU each to bid for two, each winner would pay all it won for what the others lose, and the
    worst would go empty-handed round by round. Whoever wants all that is on offer bids alone: GPUs that lie together
    stay together. (Of up to five apps that want some, at f = 0.8, the worst bids alone, too.)
    """

    recalls: ClassVar[bool] = True
    f: float = 0.8

    def bidders(self, situation: Situation) -> list[str]:
        holding = {app for app, held in situation.held.items() if held} | set(situation.holder.values())

        def behind(app: str) -> tuple[bool, float, str]:
            # Without any GPU rho is as good as infinite and says nothing: who has waited longest, measured by what it
            # has to do, is the one whose rho would be worst if it had all that it could use from now on.
            report = situation.reports[app]
            return app in holding, -(report.rho if app in holding else report.best), app

        wanting = sorted((app for app in situation.reports if situation.wants(app) > 0), key=behind)
        most = max(1, math.ceil((1 - self.f) * len(wanting) - 1e-9))
        wanted = list(accumulate(situation.wants(app) for app in wanting))
        enough = bisect_left(wanted, len(situation.offer)) + 1
        return wanting[: min(most, enough)]

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> Outcome:
        clearing = clear_auction(bids.values(), situation.offer, where=situation.offer)
        grants = {gpu: app for app, gpus in clearing.allocation.items() for gpu in gpus}
        left = share_leftover(situation, grants, bids)
        final = renew(situation, {**grants, **left})
        return Outcome(final, frozenset(gpu for gpu in left if final[gpu] == left[gpu]), clearing)


def renew(situation: Situation, grants: Mapping[str, str]) -> dict[str, str]:
    """Leave with its holder what would harm it more to lose than it helps the other to get.

    GPUs come up for auction a few at a time and a few apps bid, so most holders do not. Without this rule two equals
    would take a GPU from each other in turn, for ever. A GPU stays if its holder, with what it keeps, would then be
    worse off than the other is now; never the holder's last one, so that apps beyond the number of GPUs take turns.
    Of one machine whole gangs stay or go: half of one is slow for both.
    """
    final = dict(grants)
    count = Counter(situation.holder.values())
    for app, gpus in situation.held.items():
        count[app] += len(gpus)
    rooms = {app: situation.wants(app) for app in situation.reports}
    for app in grants.values():
        rooms[app] = rooms.get(app, 0) - 1
    changing: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for gpu, winner in sorted(grants.items()):
        holder = situation.holder.get(gpu)
        if holder is not None and holder != winner and holder in situation.reports:
            changing[holder, winner, situation.offer[gpu].machine].append(gpu)
    for (holder, winner, _), left in changing.items():
        theirs, other = situation.reports[holder], situation.reports[winner]
        while left:
            size = min(len(left), max(theirs.gang, other.gang))
            if size >= count[holder]:
                size = 1
            part, left = left[:size], left[size:]
            keeps = count[holder] - size
            worse = keeps and theirs.rho * count[holder] / keeps > other.rho
            if worse and rooms[holder] >= size:
                final.update(dict.fromkeys(part, holder))
                rooms[holder] -= size
                rooms[winner] += size
            else:
                count[holder] -= size
    return final


def share_leftover(situation: Situation, grants: Mapping[str, str], bids: Mapping[str, Bid]) -> dict[str, str]:
    """Leftover GPUs: one gang to each app that has waited long and would hold nothing, worst first; then to apps that
    did not bid, longest first by what is left; then, worst rho first, to those that did.

    The paper draws lots. By the longest the cluster's last app ends earlier, and the same app has them again next time:
    fewer moves. To overstate one's work wins leftovers and loses auctions, which costs more (docs/themis.md). But an
    app that can use one GPU and bids beside a larger one wins it and pays all of it: round by round it would get none.
    Each turn gives one app as many GPUs as its gang, of one machine where there are so many.
    """
    free: dict[str, list[str]] = defaultdict(list)
    for gpu in sorted(situation.offer.keys() - grants.keys()):
        free[situation.offer[gpu].machine].append(gpu)
    got = Counter(grants.values())
    given: dict[str, str] = {}

    def give(app: str) -> None:
        size = min(situation.reports[app].gang, situation.wants(app) - got[app])
        near = Counter(gpu.machine for gpu in situation.held[app])
        near.update(situation.offer[gpu].machine for gpu, holder in {**grants, **given}.items() if holder == app)
        own = Counter(machine for machine, gpus in free.items() for gpu in gpus if situation.holder.get(gpu) == app)
        # Where a whole gang fits; near its others: it may move together lease by lease; where it is now; tightest.
        machine = min(
            free, key=lambda m: (len(free[m]) < size, -near[m], -min(size, own[m]), abs(len(free[m]) - size), m)
        )
        chosen = sorted(free[machine], key=lambda gpu: (situation.holder.get(gpu) != app, gpu))[:size]
        for gpu in chosen:
            given[gpu] = app
            got[app] += 1
            free[machine].remove(gpu)
        if not free[machine]:
            del free[machine]

    waited = [app for app, report in situation.reports.items() if report.best >= WAITED]
    empty = [app for app in waited if not situation.held[app] and not got[app]]
    for app in sorted(empty, key=lambda app: (-situation.reports[app].best, app)):
        if free and situation.wants(app) > 0:
            give(app)
    others = situation.reports.keys() - bids.keys()
    longest = sorted(others, key=lambda app: (situation.reports[app].left, app), reverse=True)
    for app in longest + sorted(bids, key=lambda app: (-situation.reports[app].rho, app)):
        while free and situation.wants(app) > got[app]:
            give(app)
    return given
