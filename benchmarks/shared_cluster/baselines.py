"""The schedulers that Themis is compared with (section 6.1), each by its rule, as policies of the same arbiter.

Each of them orders the apps and hands out GPUs greedily. Those that know about placement give an app the densest GPUs
that are free, the others the first ones. Under FIFO leases never end, so it takes no GPU from an app. `Paper` is the
auction as the paper has it, and "strawman" the order by rho that its section 3.3 starts from. Shockwave and Sia, which
plan with a solver, are in `planned`.

Every policy may recall leases and may leave GPUs with their holders (`Themis` says what that is); by itself none does.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.shared_cluster.apps import Facts
from benchmarks.shared_cluster.greedy import Rule, Supply
from benchmarks.shared_cluster.planned import Shockwave, Sia
from themis_bridge.auction import Bid, clear_auction
from themis_bridge.locality import Gpu
from themis_bridge.policy import Policy, Situation, Themis, worst_first
from themis_bridge.winner_determination import EQUAL


@dataclass
class Ordered(Rule):
    """Apps in the order of a key; each gets all GPUs that it wants before the next one gets any."""

    #: (facts, the most GPUs that it could hold) -> key; the smallest comes first.
    key: Callable[[Facts, int], float]
    dense: bool
    #: Whether leases end, so that another app can get the GPU.
    preempts: bool = True

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> dict[str, str]:
        supply = Supply(situation, self.dense)
        facts = {app: need.report.facts for app, need in situation.needs.items()}
        room = {app: len(situation.held[app]) + max(0, situation.wants(app)) for app in facts}
        for app in sorted(facts, key=lambda app: (self.key(facts[app], room[app]), facts[app].arrived, app)):
            supply.give_gpus(app, supply.wants[app])
        return self.final(situation, supply.grants)


@dataclass
class Strawman(Rule):
    """Apps in the order of rho, the worst first (section 3.3); each gets all GPUs that it wants."""

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> dict[str, str]:
        supply = Supply(situation, dense=True)
        for app in worst_first(situation):
            supply.give_gpus(app, supply.wants[app])
        return self.final(situation, supply.grants)


@dataclass
class Paper(Rule):
    """The paper's rule (pseudocode 1): the worst ``1 - f`` share of the apps bids, however few would do.

    Leftovers go by lot to the apps that did not bid, one GPU at a time, and then to those that did, worst rho first.
    """

    f: float
    lots: random.Random = field(default_factory=lambda: random.Random(0))

    def bidders(self, situation: Situation) -> list[str]:
        wanting = worst_first(situation)
        return wanting[: max(1, math.ceil((1 - self.f) * len(wanting) - EQUAL))]

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> dict[str, str]:
        clearing = clear_auction(bids.values(), situation.offer)
        grants = {gpu: app for app, gpus in clearing.allocation.items() for gpu in gpus}
        got = Counter(grants.values())
        order = worst_first(situation)
        left = sorted(situation.offer.keys() - grants.keys())
        given: dict[str, str] = {}
        for gpu in left:
            wanting = [app for app in order if situation.wants(app) > got[app]]
            others = [app for app in wanting if app not in bids]
            if wanting:
                given[gpu] = app = self.lots.choice(others) if others else wanting[0]
                got[app] += 1
        return self.final(situation, {**grants, **given})


@dataclass
class Shares(Rule):
    """One gang at a time to the app with the smallest key; of equals, to the one with fewest GPUs."""

    #: (facts, number of GPUs that it has so far, the GPUs that it would have with the next gang) -> key.
    key: Callable[[Facts, int, list[Gpu]], float]
    dense: bool

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> dict[str, str]:
        supply = Supply(situation, self.dense)
        needs = situation.needs
        held = {app: list(situation.held[app]) for app in needs}
        size = {app: max(1, need.gang) if self.dense else 1 for app, need in needs.items()}

        def key(app: str) -> tuple[float, int, float, str]:
            facts, have = needs[app].report.facts, held[app]
            more = [situation.offer[gpu] for gpu in supply.pick_gpus(app, min(size[app], supply.wants[app]))]
            return self.key(facts, len(have), have + more), len(have), facts.arrived, app

        while supply.free and (wanting := [app for app in needs if supply.wants[app]]):
            app = min(wanting, key=key)
            held[app] += [situation.offer[gpu] for gpu in supply.give_gpus(app, size[app])]
        return self.final(situation, supply.grants)


def _marginal(facts: Facts, have: int, then: list[Gpu]) -> float:
    """Optimus: minus the ratio of the app's throughput with one gang more to that without."""
    if not have:
        return -math.inf
    return -facts.value.finish((), {1: have}) / facts.value.finish((), {1: len(then)})


def _slowdown(facts: Facts, have: int, then: list[Gpu]) -> float:
    """Gandiva: the app's slowdown on the placement of all its GPUs."""
    return facts.value.finish(then) / facts.value.finish((), {len(then): 1})


#: Name -> how to make the policy.
BASELINES: dict[str, Callable[[], Ordered | Shares | Strawman | Shockwave | Sia]] = {
    "strawman": lambda: Strawman(),
    "tiresias": lambda: Ordered(lambda facts, room: facts.attained, dense=False),
    "gandiva": lambda: Shares(_slowdown, dense=True),
    "optimus": lambda: Shares(_marginal, dense=True),
    "slaq": lambda: Ordered(lambda facts, room: -facts.quality, dense=False),
    "srtf": lambda: Ordered(lambda facts, room: facts.value.finish((), {room: 1} if room else {}), dense=True),
    "srsf": lambda: Ordered(lambda facts, room: facts.service_left, dense=False),
    "drf": lambda: Shares(lambda facts, have, then: have, dense=False),
    "fifo": lambda: Ordered(lambda facts, room: facts.arrived, dense=False, preempts=False),
    "shockwave": Shockwave,
    "sia": Sia,
}


def policy(name: str, f: float, recalls: bool | None = None, renews: bool | None = None) -> Policy:
    """Themis or the paper's rule with this f, or a baseline, by name. ``recalls``, ``renews``: None: as it has them."""
    made = Themis(f) if name == "themis" else Paper(f) if name == "paper" else BASELINES[name]()
    made.recalls = made.recalls if recalls is None else recalls
    made.renews = made.renews if renews is None else renews
    return made
