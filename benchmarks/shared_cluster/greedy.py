"""What the baselines share: handing out the GPUs on offer, and the option of renewal."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from themis_bridge.policy import Situation, renewed


class Supply:
    """The GPUs on offer while they are handed out. ``dense``: whether an app gets GPUs that lie close together."""

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
        self.wants = {app: max(0, situation.wants(app)) for app in situation.needs}

    def give_gpus(self, app: str, size: int) -> list[str]:
        """Give an app up to ``size`` GPUs: no more than it wants, and no more than there are."""
        size = min(size, self.wants[app])
        self.wants[app] -= size
        picked = self.pick_gpus(app, size)
        for gpu in picked:
            machine = self.situation.offer[gpu].machine
            self.grants[gpu] = app
            self.near[app][machine] += 1
            self.free[machine].remove(gpu)
            if not self.free[machine]:
                del self.free[machine]
        return picked

    def pick_gpus(self, app: str, size: int) -> list[str]:
        """The GPUs that the app would be given."""
        free, near = dict(self.free), self.near[app]
        picked: list[str] = []
        if not self.dense:
            return self._own_first(app, sorted(itertools.chain(*free.values())))[:size]
        while free and len(picked) < size:
            rest = size - len(picked)
            machine = min(free, key=lambda m: (-near[m], -min(rest, len(free[m])), len(free[m]), m))
            picked += self._own_first(app, free.pop(machine))[:rest]
        return picked

    def _own_first(self, app: str, gpus: list[str]) -> list[str]:
        """The GPUs in order, those that the app holds now first, so that it does not move without need."""
        return sorted(gpus, key=lambda gpu: self.situation.holder.get(gpu) != app)


@dataclass
class Rule:
    """What a policy does besides its rule. ``recalls``, ``renews``: as of `Themis`."""

    recalls: bool = field(default=False, kw_only=True)
    renews: bool = field(default=False, kw_only=True)

    def bidders(self, situation: Situation) -> list[str]:
        return []

    def final(self, situation: Situation, grants: dict[str, str]) -> dict[str, str]:
        return renewed(situation, grants) if self.renews else grants
