"""Rivals of the search: placements without buckets, and some without stages.

Each takes a simulator and a number of GPUs, and returns groups. Source: AlpaServe, section 6, and its public code
(alpa-projects/mms).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from symphony_serve.placement.selection import fast_greedy
from symphony_serve.placement.served_models import Group, Shape
from symphony_serve.placement.simulator import Requests, Simulator

ALONE, FOUR = Shape(1, 1), Shape(1, 4)


def _greedy(simulator: Simulator, gpus: int, memory: float, shape: Shape) -> tuple[Group, ...]:
    *_, found = fast_greedy(simulator, [[shape] * (gpus // shape.gpus)], memory)
    return found[0].groups


def selective_replication(simulator: Simulator, gpus: int, memory: float) -> tuple[Group, ...]:
    """The fast greedy, each GPU alone."""
    return _greedy(simulator, gpus, memory, ALONE)


def greedy_4(simulator: Simulator, gpus: int, memory: float) -> tuple[Group, ...]:
    """The fast greedy on pipelines of four stages."""
    return _greedy(simulator, gpus, memory, FOUR)


def uniform(simulator: Simulator, gpus: int, memory: float) -> tuple[Group, ...]:
    """GPU i has the models i, i + 1, ..., around, as many as fit one after the other."""
    count, sizes = len(simulator.models), [one.cuts[ALONE].bytes for one in simulator.models]
    groups = []
    for gpu in range(gpus):
        order = [(gpu + step) % count for step in range(count)]
        fit = int((np.cumsum([sizes[one] for one in order]) <= memory).sum())
        groups.append(Group(ALONE, tuple(order[:fit])))
    return tuple(groups)


def round_robin(simulator: Simulator, gpus: int, memory: float) -> tuple[Group, ...]:
    """On pipelines of four stages: each model goes to the next group if it fits, until a pass places none."""
    groups: list[list[int]] = [[] for _ in range(gpus // FOUR.gpus)]
    sizes = [one.cuts[FOUR].bytes for one in simulator.models]
    at, placed = 0, True
    while placed:
        placed = False
        for model, size in enumerate(sizes):
            held = groups[at]
            if model not in held and sum(sizes[one] for one in held) + size <= memory:
                held.append(model)
                at, placed = (at + 1) % len(groups), True
    return tuple(Group(FOUR, tuple(sorted(held))) for held in groups if held)


def clockwork(simulator: Simulator, gpus: int, memory: float, window: float) -> float:
    """The attainment of Clockwork++: selective replication anew for each ``window`` seconds of the actual requests.

    Models move at no cost, and each window begins with empty queues, so that it is a bound on what moving can do.
    """
    requests, attained = simulator.requests, 0.0
    for start in np.arange(0.0, requests.times[-1] + 1e-9, window):
        inside = (requests.times >= start) & (requests.times < start + window)
        if inside.any():
            part = Simulator(simulator.models, Requests(requests.times[inside], requests.models[inside]))
            held = selective_replication(part, gpus, memory)
            attained += answered(part, held).sum()
    return attained / len(requests)


def answered(simulator: Simulator, groups: Sequence[Group]) -> np.ndarray:
    """By request, whether it is answered within its SLO."""
    return simulator.play(*simulator.lane(groups)).attained[:, 0]
