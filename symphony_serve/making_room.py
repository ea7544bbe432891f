"""Which model that is asked for comes into memory, and which ones leave it: a decision of `replacement`. It is pure.

A model that is in no device's memory comes as soon as it is asked where there is room, or where models stand that
nobody asks; the one that was asked the longest ago leaves. A place that is in use must be paid for, as a change costs
others their requests: the model has missed `PAID` times as many. All times are seconds, all memory is bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

Placement = Mapping[int, frozenset[str]]

#: Requests that a model has missed for each one that others are likely to lose by its coming. Source: to rent or to buy
#: (Karlin and others, "Competitive snoopy caching", 1988): with 1, changes lose as many requests as were missed before
#: them, with 2 half as many. So if 1 % of the requests are for a model without a place, less than 2 % are lost.
PAID = 2.0
#: Loads that a change takes: the model loads, stays for as long, and what has left loads again.
CHANGE = 3.0
#: Seconds of a load that was not seen. Judgement: a process takes as long to start.
LOAD_S = 1.0


@dataclass(frozen=True)
class Demand:
    """How a model is asked, as of the moment ``at``. load: seconds of its latest load. last: when it was asked last.

    stands: since when a device has it; infinite: none has. missed: the requests that have come since none has. lately:
    its requests, each less by the factor e for every `CHANGE` loads that have passed since.
    """

    load: float = LOAD_S
    at: float = -math.inf
    last: float = -math.inf
    stands: float = math.inf
    missed: int = 0
    lately: float = 0.0

    @property
    def stays(self) -> bool:
        """Whether it has come so lately that what has waited for it may wait still: within the seconds of a load."""
        return self.at - self.stands < self.load

    def after(self, count: int, now: float, stands: bool) -> Demand:
        """With ``count`` requests since. stands: whether a device has it now."""
        return replace(
            self,
            at=now,
            last=now if count else self.last,
            stands=min(self.stands, now) if stands else math.inf,
            missed=0 if stands else self.missed + count,
            lately=self.lately * math.exp((self.at - now) / (CHANGE * self.load)) + count,
        )

    def loss(self, load: float) -> float:
        """Requests that it is likely to lose if it leaves for a model of so many seconds of a load, and comes back."""
        return self.lately * (2 * load + self.load) / (CHANGE * self.load)


def placed_for(
    model: str,
    target: Placement,
    held: Placement,
    sizes: Mapping[str, float],
    memory: float,
    demands: Mapping[str, Demand],
) -> Placement | None:
    """The target with the model on one device more, and without the models that leave for it; None: not yet.

    target: the models that each device is to have, held: that it has. sizes: bytes by model, memory: of each device.
    """
    paid, load = demands[model].missed / PAID, demands[model].load
    copies = Counter(one for models in target.values() for one in models)
    costs = {one: demands[one].loss(load) / copies[one] for one in copies}
    last = {one: demands[one].last if copies[one] == 1 else -math.inf for one in copies}
    found: list[tuple[bool, float, float, int, frozenset[str]]] = []
    for number, models in target.items():
        gone: list[str] = []
        room = memory - sum(sizes[one] for one in models)
        for one in sorted(models & held[number], key=lambda one: (last[one], costs[one], one)):
            able = costs[one] <= paid and (copies[one] > 1 or not demands[one].stays)
            if able and room < sizes[model]:
                gone.append(one)
                room += sizes[one]
        for one in reversed(tuple(gone)):  # A large one that has joined them may leave room enough for others.
            if room - sizes[one] >= sizes[model]:
                gone.remove(one)
                room -= sizes[one]
        cost = sum(costs[one] for one in gone)
        if room >= sizes[model] and cost <= paid:
            latest = max((last[one] for one in gone), default=0.0)
            found.append((bool(gone), latest, cost, number, frozenset(gone)))
    if not found:
        return None
    *_, number, leave = min(found, key=lambda one: one[:4])
    return {**target, number: target[number] - leave | {model}}
