"""How GPUs become groups, and which models stand in each (AlpaServe, algorithm 2).

`Search.steps` takes one step after another; `Search.best` is the best placement so far. All models stand in one bucket
first. Then models of like latency form a bucket each, and the GPUs are split over the buckets. In each part, groups of
each shape are tried by `selection.fast_greedy`. At the end `selection.beam` fills the groups of the best placement
anew. `LeastGpus` searches with more and with fewer GPUs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from symphony_serve.errors import ServeError
from symphony_serve.placement.selection import Selection, beam, evaluate, fast_greedy
from symphony_serve.placement.served_models import Group, ServedModel, Shape
from symphony_serve.placement.simulator import Requests, Simulator

#: Two models of one bucket differ by less than this part of the first one's latency. Source: alpa-projects/mms.
ALIKE = 0.38
#: How far the part of the throughput that a bucket gets may be from its part of the rate: the first of these that
#: leaves fewer than `MOST_SPLITS` splits. Source: alpa-projects/mms.
UNEVEN = (1.0, 0.5, 0.3, 0.2, 0.1)
MOST_SPLITS = 100
#: Of more splits than this, only the one in proportion to the load is taken. Judgement: these are rated in .3 s.
MOST_LOOKED_AT = 50_000
#: Of more lanes than this times GPUs times models, only the split in proportion is taken. The beam is left out if more
#: placements than `MOST_BEAM` come after one. Judgement: memory for the one, hours for the other.
MOST_CELLS, MOST_BEAM = 20_000_000, 2000
#: GPUs of a node. Shapes have powers of two, so that a larger group has whole nodes.
NODE_GPUS = 8
#: No plan is made for more GPUs (docs/placement.md says how long one takes).
MOST_GPUS = 1024


def buckets_of(models: Sequence[ServedModel]) -> list[list[int]]:
    """The models' numbers by bucket: by latency, descending, each goes into the first bucket whose first is alike."""
    found: list[list[int]] = []
    for number in sorted(range(len(models)), key=lambda one: -models[one].alone):
        for bucket in found:
            first = models[bucket[0]].alone
            if abs(models[number].alone - first) / first < ALIKE:
                bucket.append(number)
                break
        else:
            found.append([number])
    return found


def groupings(gpus: int, shapes: Sequence[Shape]) -> list[list[Shape]]:
    """The groups that ``gpus`` GPUs can become: as many as can be of one shape, and pipelines of the rest."""
    found = []
    for shape in sorted(shapes, key=lambda one: (one.gpus, one)):
        size = shape.gpus
        if size <= gpus:
            found.append([shape] * (gpus // size) + _pipelines(gpus % size, shapes))
    return found


def _pipelines(gpus: int, shapes: Sequence[Shape]) -> list[Shape]:
    """The longest pipelines first, of 8, 4, 2 and 1 stages, until no GPU is left for one."""
    found = []
    for shape in sorted((one for one in shapes if one.op == 1), reverse=True):
        found += [shape] * (gpus // shape.gpus)
        gpus %= shape.gpus
    return found


def splits_of(gpus: int, rates: Sequence[float], latencies: Sequence[float]) -> list[tuple[int, ...]]:
    """The numbers of GPUs of each bucket that are tried, by the buckets' rates and their first models' latencies.

    Each bucket has a GPU at least. If the GPUs are not whole nodes, the parts are whole nodes or at most the rest.
    """
    loads = [rate * latency for rate, latency in zip(rates, latencies, strict=True)]
    rest = gpus % NODE_GPUS
    sizes = [one for one in range(1, gpus) if not rest or one <= rest or one % NODE_GPUS in (0, rest)]
    if len(rates) > gpus:
        return []
    if len(sizes) ** (len(rates) - 1) > MOST_LOOKED_AT:
        return [_in_proportion(gpus, loads)]
    heads = itertools.product(sizes, repeat=len(rates) - 1)
    splits = [(*head, gpus - sum(head)) for head in heads if gpus - sum(head) in sizes]
    total = sum(rates) or 1.0

    def uneven(split: Sequence[int]) -> float:
        through = [count / latency for count, latency in zip(split, latencies, strict=True)]
        return max(abs(one / sum(through) - rate / total) for one, rate in zip(through, rates, strict=True))

    rated = [(uneven(split), split) for split in splits]
    kept = splits
    for limit in UNEVEN:
        kept = [split for gap, split in rated if gap < limit]
        if len(kept) < MOST_SPLITS:
            break
    return kept[:MOST_SPLITS] or [_in_proportion(gpus, loads)]


def _in_proportion(gpus: int, loads: Sequence[float]) -> tuple[int, ...]:
    """One GPU each, and each further one to the part with the most load for each of its GPUs."""
    parts = [1] * len(loads)
    for _ in range(gpus - len(loads)):
        parts[max(range(len(loads)), key=lambda one: loads[one] / parts[one])] += 1
    return tuple(parts)


class Search:
    """A search on ``gpus`` GPUs of ``memory`` bytes, which ends when ``goal`` is attained. `best` is its answer.

    parts: by bucket and number of GPUs, what was found before for the same models, memory and requests; it is added to.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        gpus: int,
        memory: float,
        requests: Requests,
        goal: float = 1.0,
        parts: dict[tuple[int, int], Selection] | None = None,
    ):
        self.models, self.gpus, self.requests = models, gpus, requests
        self.best = Selection()
        self._memory, self._goal = memory, goal
        self._simulator = Simulator(models, requests)
        self._parts = {} if parts is None else parts

    def steps(self) -> Iterator[Selection]:
        """Search; after each step of it `best`, which is told, is a placement that fits."""
        yield from self.greedy()
        yield from self.beam()

    def greedy(self) -> Iterator[Selection]:
        """The search but for its last part: one bucket, then several."""
        lanes = groupings(self.gpus, self._simulator.shapes)
        for found in fast_greedy(self._simulator, lanes, self._memory, self._goal):
            self._take(max(found, key=lambda one: one.score))
            yield self.best
        buckets = buckets_of(self.models)
        if len(buckets) > 1 and self.best.attainment < self._goal:
            yield from self._buckets(buckets)

    def beam(self) -> Iterator[Selection]:
        """The last part of the search: the groups of the best placement are filled anew."""
        if not self.best.groups or self.best.attainment >= self._goal:
            return
        shapes = [group.shape for group in self.best.groups]
        shapes += _pipelines(self.gpus - sum(shape.gpus for shape in shapes), self._simulator.shapes)
        if len(shapes) * len(self.models) > MOST_BEAM:
            return
        for one in beam(self._simulator, shapes, self._memory, self._goal):
            self._take(one)
            yield self.best

    def _take(self, one: Selection) -> None:
        if one.score > self.best.score:
            self.best = one

    def _buckets(self, buckets: Sequence[Sequence[int]]) -> Iterator[Selection]:
        counts = self._simulator.counts
        rates = [float(counts[bucket].sum()) for bucket in buckets]
        latencies = [self.models[bucket[0]].alone for bucket in buckets]
        splits = splits_of(self.gpus, rates, latencies)
        if len(splits) * len(self._simulator.shapes) * self.gpus * len(self.models) > MOST_CELLS:
            loads = [rate * latency for rate, latency in zip(rates, latencies, strict=True)]
            splits = [_in_proportion(self.gpus, loads)] if splits else []
        for at, bucket in enumerate(buckets):
            simulator = Simulator([self.models[one] for one in bucket], self.requests.of(bucket))
            sizes = {size for size in (split[at] for split in splits) if (at, size) not in self._parts}
            lanes = [(size, lane) for size in sorted(sizes) for lane in groupings(size, simulator.shapes)]
            found: list[Selection] = []
            for selections in fast_greedy(simulator, [lane for _, lane in lanes], self._memory):
                found = selections
                yield self.best
            self._parts |= {(at, size): Selection() for size in sizes}
            for (size, _), one in zip(lanes, found, strict=True):
                self._parts[at, size] = max(self._parts[at, size], one, key=lambda each: each.score)
        weights = [float(self._simulator.weights[bucket] @ counts[bucket]) for bucket in buckets]

        def score(split: Sequence[int]) -> float:
            return sum(
                weight * max(self._parts[at, size].score, 0.0)
                for at, (weight, size) in enumerate(zip(weights, split, strict=True))
            )

        if splits:
            split = max(splits, key=score)
            groups = [
                Group(group.shape, tuple(bucket[one] for one in group.models))
                for at, (bucket, size) in enumerate(zip(buckets, split, strict=True))
                for group in self._parts[at, size].groups
            ]
            self._take(evaluate(self._simulator, groups))
            yield self.best


class LeastGpus:
    """Looks for the least number of GPUs that attains ``goal``: `best` is the last placement that did, on `gpus`.

    Searches are no proof, so that fewer GPUs may do. busy: GPUs that all requests keep busy, at least.
    """

    def __init__(self, models: Sequence[ServedModel], memory: float, requests: Requests, goal: float, busy: float = 0):
        self.gpus, self.best = 0, Selection()
        self._first = max(1, math.ceil(goal * busy))
        self._models, self._memory, self._requests, self._goal = models, memory, requests, goal
        self._parts: dict[tuple[int, int], Selection] = {}

    def steps(self) -> Iterator[Selection]:
        """Search without a beam on as many GPUs as are busy, on twice as many until it suffices, and below that.

        Fewer than are busy may do, as models have weights. Then search with a beam on one GPU less, until that does not
        suffice. What is told is the best of the search that goes on.
        """
        low, count = 0, self._first
        while not self.gpus or self.gpus - low > 1:
            search = self._on(count)
            yield from search.greedy()
            if not self._suffices(search):
                low = count
            if not self.gpus and count >= MOST_GPUS:
                raise ServeError(
                    f"{count} GPUs attain {search.best.attainment:.4f}, less than {self._goal:g}, and no plan is "
                    "made for more; ask about smaller rates or longer SLOs"
                )
            count = (low + self.gpus) // 2 if self.gpus else min(2 * count, MOST_GPUS)
        while self.gpus > 1:
            search = self._on(self.gpus - 1)
            yield from search.steps()
            if not self._suffices(search):
                return

    def _on(self, gpus: int) -> Search:
        return Search(self._models, gpus, self._memory, self._requests, self._goal, self._parts)

    def _suffices(self, search: Search) -> bool:
        """Whether ``search`` has attained the goal; it is the answer then."""
        if search.best.attainment < self._goal:
            return False
        # Those that hold no model are not needed.
        self.gpus, self.best = sum(group.shape.gpus for group in search.best.groups), search.best
        return True
