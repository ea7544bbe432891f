"""Seeded TrialGroups to plan, from five families with different distributions of heights and overheads.

`instances` draws small groups (1 to 64 devices), `large` one of a given size. The same seed gives the same groups on
every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from fluidtune.planning import TrialLoad

#: Family -> the smallest and largest number of trials per device (a group has at least one trial). 0.5 to 20 covers
#: the dissertation's evaluation, which has groups of 9 to 81 trials on 4 to 16 GPUs.
FAMILIES: dict[str, tuple[float, float]] = {
    "equal": (0.5, 20.0),
    "long_tailed": (0.5, 20.0),
    "few_and_long": (0.0, 0.5),
    "many_and_short": (8.0, 32.0),
    "mixed_overheads": (0.5, 20.0),
}


@dataclass(frozen=True)
class Instance:
    """One TrialGroup with its ``n`` devices, packing limit ``c`` and scaling limit ``d``."""

    family: str
    loads: list[TrialLoad]
    n: int
    c: int
    d: int


def instances(count: int, seed: int) -> Iterator[Instance]:
    """``count`` instances, the families in turn: n log-uniform in 1 to 64, c in 2 to 4, d one of 2, 4, 8."""
    rng = random.Random(seed)
    for index in range(count):
        family = list(FAMILIES)[index % len(FAMILIES)]
        n = min(64, int(64 ** rng.random() * 65 / 64))
        c, d = rng.choice((2, 3, 4)), rng.choice((2, 4, 8))
        fewest, most = FAMILIES[family]
        trials = rng.randint(max(1, int(fewest * n)), max(1, int(most * n)))
        yield Instance(family, _loads(family, trials, c, d, rng), n, c, d)


def large(family: str, trials: int, n: int, seed: int) -> Instance:
    """One instance of the family with c = 3 and d = 8."""
    return Instance(family, _loads(family, trials, 3, 8, random.Random(seed)), n, 3, 8)


def _loads(family: str, trials: int, c: int, d: int, rng: random.Random) -> list[TrialLoad]:
    def overheads() -> tuple[float, float]:
        # The paper's ranges, within which packing up to c and scaling up to d always pay.
        return rng.uniform(1, c / (c - 1) - 1e-6), rng.uniform(1, 1 + 1 / d - 1e-6)

    shared, same = overheads(), rng.uniform(10, 1000)
    loads = []
    for i in range(trials):
        if family == "equal":
            height = same
        elif family == "long_tailed":
            height = rng.lognormvariate(4, 1.5)
        elif family == "few_and_long":
            height = rng.uniform(500, 5000)
        elif family == "many_and_short":
            height = rng.uniform(1, 60)
        else:
            height = 1 + rng.expovariate(1 / 200)
        alpha, beta = overheads() if family == "mixed_overheads" else shared
        loads.append(TrialLoad(f"trial{i}", height, alpha, beta))
    return loads
