"""The schedulers that Themis is compared with, by their rule, as policies of the same arbiter (section 6.1).

Each orders the apps and hands GPUs out greedily. Those that know about placement give an app the densest GPUs that
are free; the others take any. DRF and FIFO never take a GPU from an app: their leases do not end.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from themis_bridge.auction import Bid
from themis_bridge.locality import Gpu
from themis_bridge.policy import Outcome, Policy, Situation, Themis
from themis_bridge.twin.apps import Facts


class _Hand:
    """GPUs being handed out."""

    def __init__(self, situation: Situation, dense: bool):
        self.situation, self.dense = situation, dense
        self.free: dict[str, list[str]] = defaultdict(list)
        for gpu in sorted(situation.offer):
            self.free[situation.offer[gpu].machine].append(gpu)
        self.grants: dict[str, str] = {}
        self.near = {app: Counter(gpu.machine for gpu in held) for app, held in situation.held.items()}
        for gpu, app in situation.holder.items():
            if app in self.near:
                self.near[app][situation.offer[gpu].machine] += 1
        self.wants = {app: max(0, situation.wants(app)) for app in situation.reports}

    def give(self, app: str, size: int) -> None:
        """Up to ``size`` GPUs, as many as it wants and as there are."""
        size = min(size, self.wants[app])
        self.wants[app] -= size
        while size and self.free:
            if self.dense:
                near, free = self.near[app], self.free
                machine = min(free, key=lambda m: (-near[m], -min(size, len(free[m])), len(free[m]), m))
                count = min(size, len(self.free[machine]))
            else:
                own = [m for m, gpus in self.free.items() if any(self.situation.holder.get(g) == app for g in gpus)]
                machine = self.situation.rng.choice(sorted(own or self.free))
                count = 1
            # Nobody moves for the sake of moving.
            self.free[machine].sort(key=lambda gpu: (self.situation.holder.get(gpu) != app, gpu))
            for gpu in self.free[machine][:count]:
                self.grants[gpu] = app
            self.near[app][machine] += count
            del self.free[machine][:count]
            if not self.free[machine]:
                del self.free[machine]
            size -= count


@dataclass
class Ordered:
    """Apps in the order of a key; each gets all it wants before the next one gets any."""

    key: Callable[[Facts, int], float]
    dense: bool
    #: Leases end, so that the order can change.
    preempts: bool = True

    def bidders(self, situation: Situation) -> list[str]:
        return []

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> Outcome:
        hand = _Hand(situation, self.dense)
        facts = {app: report.facts for app, report in situation.reports.items()}
        room = {app: len(situation.held[app]) + max(0, situation.wants(app)) for app in facts}
        for app in sorted(facts, key=lambda app: (self.key(facts[app], room[app]), facts[app].arrived, app)):
            hand.give(app, hand.wants[app])
        return Outcome(hand.grants)


@dataclass
class Shares:
    """One gang after the other to the app with the smallest key, which sees what it has by then."""

    key: Callable[[Facts, int, int, list[Gpu]], float]
    dense: bool
    preempts: bool = True

    def bidders(self, situation: Situation) -> list[str]:
        return []

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> Outcome:
        hand = _Hand(situation, self.dense)
        reports = situation.reports
        have = {app: len(situation.held[app]) for app in reports}
        size = {app: max(1, report.gang) if self.dense else 1 for app, report in reports.items()}

        def key(app: str) -> tuple[float, float, str]:
            facts = reports[app].facts
            held = list(situation.held[app])
            return self.key(facts, have[app], min(size[app], hand.wants[app]), held), facts.arrived, app

        keys = {app: key(app) for app in reports if hand.wants[app]}
        while hand.free and keys:
            app = min(keys, key=keys.__getitem__)
            before = len(hand.grants)
            hand.give(app, size[app])
            have[app] += len(hand.grants) - before
            if hand.wants[app]:
                keys[app] = key(app)
            else:
                del keys[app]
        return Outcome(hand.grants)


def _marginal(facts: Facts, have: int, more: int, held: list[Gpu]) -> float:
    """Optimus: minus the throughput with one gang more over that without."""
    if not have:
        return -math.inf
    now, then = facts.value.finish((), {1: have}), facts.value.finish((), {1: have + more})
    return -now / then


#: Name -> policy.
BASELINES: dict[str, Callable[[], Ordered | Shares]] = {
    "tiresias": lambda: Ordered(lambda facts, room: facts.attained, dense=False),
    "gandiva": lambda: Ordered(lambda facts, room: -facts.sensitivity, dense=True),
    "optimus": lambda: Shares(_marginal, dense=True),
    "slaq": lambda: Ordered(lambda facts, room: -facts.quality, dense=False),
    "srtf": lambda: Ordered(lambda facts, room: facts.value.finish((), {room: 1} if room else {}), dense=True),
    "srsf": lambda: Ordered(lambda facts, room: facts.service_left, dense=False),
    "drf": lambda: Shares(lambda facts, have, more, held: have, dense=False, preempts=False),
    "fifo": lambda: Ordered(lambda facts, room: facts.arrived, dense=False, preempts=False),
}


def policy(name: str, f: float) -> Policy:
    """Themis or a baseline by name."""
    return Themis(f) if name == "themis" else BASELINES[name]()
