"""Which models stand in which group, for groups that are given (AlpaServe, algorithm 1).

`fast_greedy` plays each placement once and adds one replica to it, `beam` plays every placement with one replica more.
Both are told how many bytes of weights a GPU may hold. The bytes of a group's models, each with its largest stage, add
up to at most that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from symphony_serve.placement.served_models import Group, Shape
from symphony_serve.placement.simulator import Played, Simulator

#: Of two placements that attain the same, the one with the smaller mean latency (1e-4 for a second) is better, then the
#: one with more replicas (1e-6 for each). Source: AlpaServe's search (alpa-projects/mms).
LATENCY, REPLICAS = 1e-4, 1e-6
#: A lane is filled in about this many steps. Where more replicas fit, a step adds several. Judgement: AlpaServe's own
#: cases have fewer, and 1,000 GPUs need some thousands.
STEPS = 256


@dataclass(frozen=True)
class Selection:
    """Groups with models, and what they attain: the part of the requests' weight that is answered within its SLO."""

    groups: tuple[Group, ...] = ()
    score: float = -np.inf
    attainment: float = 0.0


def _rated(simulator: Simulator, played: Played, held: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Score and attainment by lane, and the requests that were not attained by model and lane."""
    models = len(simulator.models)
    attained = np.array([np.bincount(simulator.requests.models[one], minlength=models) for one in played.attained.T]).T
    attainment = simulator.weights @ attained / max(simulator.total, 1e-300)
    mean = np.where(played.attained, played.latency, 0.0).sum(axis=0) / np.maximum(attained.sum(axis=0), 1)
    score = attainment - LATENCY * mean + REPLICAS * held.sum(axis=(0, 2))
    return score, attainment, simulator.counts[:, None] - attained


def _fits(simulator: Simulator, shapes: np.ndarray, held: np.ndarray, memory: float) -> np.ndarray:
    """By model, lane and group, whether the model can be added to the group."""
    size = simulator.bytes[:, shapes]
    free = memory - np.where(held, size, 0.0).sum(axis=0)
    return np.logical_and(np.isfinite(size) & (size <= free), ~held)


def evaluate(simulator: Simulator, groups: Sequence[Group]) -> Selection:
    """These groups with these models, and what they attain."""
    shapes, held = simulator.lane(groups)
    score, attainment, _ = _rated(simulator, simulator.play(shapes, held), held)
    return Selection(tuple(groups), float(score[0]), float(attainment[0]))


def most_replicas(simulator: Simulator, shapes: Sequence[Shape], memory: float) -> int:
    """As many replicas fit into groups of these shapes, at most."""
    sizes = np.sort(simulator.bytes[:, simulator.shape_numbers([shapes])[0]], axis=0)
    return int((np.cumsum(sizes, axis=0) <= memory).sum())


def fast_greedy(
    simulator: Simulator, lanes: Sequence[Sequence[Shape]], memory: float, goal: float = 1.0
) -> Iterator[list[Selection]]:
    """The best selections so far, one for each list of groups' shapes, after each step.

    A step adds to each lane the model with the most requests that are not attained, of those that fit anywhere, and
    puts it into the group with the fewest requests of those that it fits. Where more than `STEPS` replicas fit, it goes
    on with other models and other groups. A lane ends when nothing fits or ``goal`` is attained.
    """
    if not lanes:
        return
    shapes = simulator.shape_numbers(lanes)
    at_once = [-(-most_replicas(simulator, one, memory) // STEPS) for one in lanes]
    held = np.zeros((len(simulator.models), *shapes.shape), dtype=bool)
    best = [Selection() for _ in lanes]
    going = np.arange(len(lanes))
    while len(going):
        here, stands = shapes[going], held[:, going]
        played = simulator.play(here, stands)
        score, attainment, lost = _rated(simulator, played, stands)
        fits = _fits(simulator, here, stands, memory)
        goes_on = []
        for at, lane in enumerate(going):
            if score[at] > best[lane].score:
                groups = simulator.groups(here[at], stands[:, at])
                best[lane] = Selection(groups, float(score[at]), float(attainment[at]))
            if attainment[at] >= goal or not fits[:, at].any():
                continue
            sent = np.bincount(played.group[:, at] + 1, minlength=here.shape[1] + 1)[1:]
            groups_first = np.argsort(sent, kind="stable")
            models_first = np.argsort(-lost[:, at] * simulator.weights, kind="stable")
            possible = fits[models_first, at][:, groups_first]
            for _ in range(at_once[lane]):
                model = int(possible.any(axis=1).argmax())
                group = int(possible[model].argmax())
                held[models_first[model], lane, groups_first[group]] |= possible[model, group]
                possible[model] = possible[:, group] = False
            goes_on.append(lane)
        going = np.array(goes_on, dtype=int)
        yield best


def beam(simulator: Simulator, shapes: Sequence[Shape], memory: float, goal: float = 1.0) -> Iterator[Selection]:
    """The best selection so far for groups of these shapes, after each step.

    A step adds each model to each group that it fits, plays all of these, and goes on from the best one, as AlpaServe's
    search does by default. The last step is the one after which nothing fits, or ``goal`` is attained.
    """
    row = simulator.shape_numbers([shapes])[0]
    held = np.zeros((len(simulator.models), len(row)), dtype=bool)
    best = Selection()
    while best.attainment < goal:
        nexts: dict[tuple[tuple[int, bytes], ...], np.ndarray] = {}
        for model, group in np.argwhere(_fits(simulator, row[None], held[:, None], memory)[:, 0]):
            one = held.copy()
            one[model, group] = True
            # Groups of one shape are alike, whatever their order.
            nexts.setdefault(tuple(sorted((int(row[at]), one[:, at].tobytes()) for at in range(len(row)))), one)
        if not nexts:
            return
        candidates = np.stack(list(nexts.values()), axis=1)
        same = np.tile(row, (len(nexts), 1))
        score, attainment, _ = _rated(simulator, simulator.play(same, candidates), candidates)
        first = int(np.argmax(score))
        held = candidates[:, first]
        if score[first] > best.score:
            best = Selection(simulator.groups(row, held), float(score[first]), float(attainment[first]))
        yield best
