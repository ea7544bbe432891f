"""How many replicas of each model at which batch, on as few GPUs as a search finds (USHER, algorithm 1).

Every replica gets all that it needs of its GPU, so none slows another. For each group of models (`model_groups`), the
configurations that no other one dominates are combined; the combinations with the lowest bounds are placed
(`bin_classes`), and the one that opens the fewest GPUs stays. Then each group, and every two models, are placed anew
among the others.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.placement.bin_classes import BinClass, Replicas, place
from benchmarks.placement.gpu_shares import BATCHES_OF_A_REQUEST, refuse_too_many
from benchmarks.placement.model_groups import groups
from benchmarks.placement.needs import FULL, Need
from symphony_serve.errors import ServeError

#: A model gets at most this multiple of the fewest replicas that it can do with. Source: USHER, algorithm 1.
MOST_REPLICAS = 6
#: Combinations of a group that are placed, each in about 0.3 ms.
MOST_PLACEMENTS = 200
#: Combinations after which nothing is placed anew. Judgement: that takes a second.
ENOUGH_PLACEMENTS = 2000
#: Weights of compute against memory in the lower bound, in twentieths. Any of them is a bound; the largest counts.
WEIGHTS = 20


class NeedyModel(NamedTuple):
    """A model, requests per second, seconds within which one is answered, and needs by batch."""

    name: str
    rate: float
    slo: float
    needs: tuple[Need, ...]

    def allowed(self) -> tuple[Need, ...]:
        """The needs whose batches allow the SLO. Raises ServeError if there are none."""
        found = tuple(one for one in self.needs if BATCHES_OF_A_REQUEST * one.seconds <= self.slo)
        if not found:
            least = BATCHES_OF_A_REQUEST * self.needs[0].seconds
            raise ServeError(
                f"model {self.name} has an SLO of {self.slo:g} s, but a request waits for a batch, then for its own, "
                f"and that takes {least:g} s at batch {self.needs[0].batch}. Give a larger SLO or a smaller batch"
            )
        return found


class Configuration(NamedTuple):
    """Replicas of a model, all at one batch."""

    replicas: int
    need: Need

    @property
    def costs(self) -> tuple[float, ...]:
        return self.replicas, self.need.compute, self.need.memory, self.need.bandwidth

    def uses(self, weight: float) -> float:
        """GPUs by compute times ``weight`` and by memory times the rest of 1."""
        return self.replicas * (weight * self.need.compute + (1 - weight) * self.need.memory)


@dataclass(frozen=True)
class NeedsPlan:
    """gpus: the models on each. chosen: by model. part: of each rate that is served. least: no plan has fewer GPUs."""

    gpus: tuple[tuple[int, ...], ...]
    chosen: tuple[Configuration, ...]
    part: float
    least: int
    placements: int


def configurations(model: NeedyModel, part: float) -> list[Configuration]:
    """What serves ``part`` of the model's rate, and is not dominated in replicas, compute and memory."""
    found = []
    for need in model.allowed():
        found.append(Configuration(max(1, math.ceil(model.rate * part / need.capacity - 1e-9)), need))
    most = MOST_REPLICAS * min(one.replicas for one in found)

    def dominated(one: Configuration) -> bool:
        others = [other.costs for other in found if other.costs != one.costs]
        return any(all(a <= b for a, b in zip(costs, one.costs, strict=True)) for costs in others)

    return [one for one in found if one.replicas <= most and not dominated(one)]


def least_gpus(options: Sequence[Sequence[Configuration]]) -> int:
    """No plan has fewer GPUs: each has one of compute and one of memory, and one replica of a model at most."""
    weights = [at / WEIGHTS for at in range(WEIGHTS + 1)]
    sums = [sum(min(one.uses(weight) for one in its) for its in options) for weight in weights]
    alone = max(min(one.replicas for one in its) for its in options)
    bandwidth = sum(min(one.replicas * one.need.bandwidth for one in its) for its in options)
    return max(alone, math.ceil(max(*sums, bandwidth) - 1e-6))


def plan_needs(models: Sequence[NeedyModel], gpus: int | None, part: float) -> NeedsPlan:
    """Few GPUs that serve ``part`` of each rate.

    gpus: if given, the largest equal part of all rates, up to ``part`` and to a hundredth of it, for which this many
    suffice. Raises ServeError if an SLO cannot be met, or if the GPUs do not suffice for a hundredth.
    """
    found = _plan(models, part)
    if gpus is None or len(found.gpus) <= gpus:
        return found
    low, high = 0, 100
    while high - low > 1:
        middle = (low + high) // 2
        tried = _plan(models, part * middle / 100)
        low, high, found = (middle, high, tried) if len(tried.gpus) <= gpus else (low, middle, found)
    if not low:
        raise ServeError(f"{gpus} GPUs do not suffice for a hundredth of the rates; give more")
    return found


def _plan(models: Sequence[NeedyModel], part: float) -> NeedsPlan:
    options = [configurations(one, part) for one in models]
    least = least_gpus(options)
    refuse_too_many(least)
    search = _Search(options, groups([one.allowed() for one in models]))
    search.run()
    filled = [held.models for held, count in sorted(search.bins.items()) for _ in range(count)]
    chosen = tuple(search.chosen[number] for number in range(len(models)))
    return NeedsPlan(tuple(filled), chosen, part, least, search.placements)


class _Search:
    """The bins, and the configurations of the groups that are in them."""

    def __init__(self, options: Sequence[Sequence[Configuration]], grouped: Sequence[tuple[int, ...]]):
        self._options = options
        least = [min(one.uses(0.5) for one in its) for its in options]
        self._groups = sorted(grouped, key=lambda group: -sum(least[number] for number in group))
        self.bins: Counter[BinClass] = Counter()
        self.chosen: dict[int, Configuration] = {}
        self.placements = 0

    def run(self) -> None:
        """Place all groups, the largest first; then each, and every two models, anew, if that takes no more GPUs."""
        least = least_gpus(self._options)
        for group in self._groups:
            self._place(group)
        for some in itertools.chain(self._groups, pairs_in_rounds(len(self._options))):
            total = self.bins.total()
            if total == least or self.placements >= ENOUGH_PLACEMENTS:
                return
            kept = self.bins, dict(self.chosen)
            gone = {number: Replicas.of(number, *self.chosen[number]) for number in some}
            self.bins = _sum((held.without(gone), count) for held, count in self.bins.items())
            self._place(some)
            if self.bins.total() > total:
                self.bins, self.chosen = kept

    def _place(self, group: tuple[int, ...]) -> None:
        """Choose the group's configurations, and place them. Of those with as few new GPUs, the least used counts."""
        free_compute = sum(count * held.compute for held, count in self.bins.items()) / FULL
        free_memory = sum(count * held.memory for held, count in self.bins.items()) / FULL

        def bound(combination: tuple[Configuration, ...]) -> tuple[int, float]:
            compute, memory = (sum(one.uses(weight) for one in combination) for weight in (1.0, 0.0))
            return max(0, math.ceil(max(compute - free_compute, memory - free_memory) - 1e-6)), compute + memory

        combinations = [(bound(one), one) for one in itertools.product(*(self._options[number] for number in group))]
        best: tuple[tuple[int, float], Counter[BinClass], tuple[Configuration, ...]] | None = None
        for (least, used), combination in sorted(combinations)[:MOST_PLACEMENTS]:
            if best is not None and (least, used) >= best[0]:
                break
            bins = Counter(self.bins)
            replicas = (Replicas.of(number, *one) for number, one in zip(group, combination, strict=True))
            opened = place(bins, replicas)
            self.placements += 1
            if best is None or (opened, used) < best[0]:
                best = (opened, used), bins, combination
        assert best is not None
        self.bins = _sum((held._replace(own=False), count) for held, count in best[1].items())
        self.chosen.update(zip(group, best[2], strict=True))


def _sum(bins: Iterable[tuple[BinClass, int]]) -> Counter[BinClass]:
    """One class for all of like content; none for those that hold nothing."""
    found: Counter[BinClass] = Counter()
    for held, count in bins:
        if held.models and count:
            found[held] += count
    return found


def pairs_in_rounds(count: int) -> Iterator[tuple[int, ...]]:
    """Every two of ``count`` once, as in a tournament: in each round everybody has one opponent, or is free."""
    players = list(range(count + count % 2))
    for _ in players[1:]:
        for one, other in zip(players, reversed(players[len(players) // 2 :]), strict=False):
            yield tuple(sorted(player for player in (one, other) if player < count))
        players.insert(1, players.pop())
