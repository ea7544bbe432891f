"""Which shares of GPUs each model gets, and where they lie: instances of MIG, or percents of MPS.

No service of FluidTune divides its GPUs so; `benchmarks.duel_parvagpu` compares these plans with ParvaGPU's.

A *segment* is a share of a GPU in which some processes of one model run batches of one size. For each model and size
of a share, only the measured segment with the most requests per second counts whose latency allows the SLO. How many
segments of each size a model gets, and how these sizes fill GPUs, is one integer program (`plan_shares`). A GPU in it
is a path over its slots, from the first to the last: an arc is a share at a place that the hardware allows, or an idle
slot. As many paths leave the first slot as there are GPUs. So the program decides placement exactly, and its relaxation
is close (Valério de Carvalho, 1999: arc flow for bin packing). The cases are those of ParvaGPU (SC'24). All times are
seconds, all rates requests per second.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.placement.integer_program import Rows, Solution
from symphony_serve.errors import ServeError

#: A request waits for the batch that runs, and then for its own. Source: gpulet's rule.
BATCHES_OF_A_REQUEST = 2
#: No plan is made for more GPUs: each is listed.
MOST_SHARED_GPUS = 100_000
#: Part of a rate by which capacity may be below it; HiGHS's tolerance of a row (1e-6).
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Sharing:
    """How a GPU is divided. slots: that it has. shares: by size, the slots of a share, and where it may begin."""

    name: str
    slots: int
    shares: Mapping[int, tuple[int, tuple[int, ...]]]

    def memory(self, size: int) -> float:
        """The part of the GPU's memory that a share of this size has."""
        return self.shares[size][0] / self.slots


#: Sizes are GPCs, slots are slices of memory. Source: NVIDIA's MIG user guide, A100 and H100 with 80 GB.
MIG = Sharing("gpcs", 8, {1: (1, tuple(range(7))), 2: (2, (0, 2, 4)), 3: (4, (0, 4)), 4: (4, (0,)), 7: (8, (0,))})


def percents(sizes: Iterable[int]) -> Sharing:
    """A GPU under MPS whose processes get these percents of its compute. Raises ServeError if one is not 1 to 100.

    Where a share lies means nothing under MPS. So shares lie side by side, the largest first: one begins where others
    at least as large may end.
    """
    wrong = [size for size in sizes if not 1 <= size <= 100]
    if wrong:
        raise ServeError(f"a share has {wrong[0]} percent, expected 1 to 100")
    shares, ends = {}, {0}
    for size in sorted(set(sizes), reverse=True):
        ends |= {end + size * count for end in ends for count in range((100 - end) // size + 1)}
        shares[size] = size, tuple(sorted(end for end in ends if end + size <= 100))
    return Sharing("percent", 100, shares)


class Segment(NamedTuple):
    """A share of ``size``, and what was measured in it: requests/s of one process, and the seconds of a batch."""

    size: int
    batch: int
    processes: int
    throughput: float
    latency: float

    @property
    def capacity(self) -> float:
        """Requests per second."""
        return self.throughput * self.processes


class SharedModel(NamedTuple):
    """A model. segments: what was measured. bytes: of one process; 0: not known."""

    name: str
    rate: float
    slo: float
    segments: tuple[Segment, ...]
    bytes: float = 0.0

    def best(self, sharing: Sharing, memory: float) -> dict[int, Segment]:
        """By size the segment with the most requests per second that allows the SLO and fits its part of the memory.

        A size is left out if a smaller one does as much, or two that fit its place do more. memory: bytes of a GPU.
        Raises ServeError if none is left.
        """
        best: dict[int, Segment] = {}
        for one in sorted(self.segments, key=lambda one: (one.size, one.capacity, -one.latency)):
            fits = self.bytes * one.processes <= memory * sharing.memory(one.size)
            if fits and BATCHES_OF_A_REQUEST * one.latency <= self.slo:
                best[one.size] = one
        found: dict[int, Segment] = {}
        worth: dict[int, float] = {}  # requests/s in the place of a share of this size
        for size, one in best.items():
            places = {other: sharing.shares[other][0] for other in worth}
            smaller = max(worth.values(), default=0.0)
            two = max(
                (
                    worth[first] + worth[second]
                    for first, second in itertools.combinations_with_replacement(worth, 2)
                    if first + second <= size and places[first] + places[second] <= sharing.shares[size][0]
                ),
                default=0.0,
            )
            worth[size] = max(one.capacity, smaller, two)
            if one.capacity > smaller and one.capacity >= two:
                found[size] = one
        if not found:
            fastest = min(one.latency for one in self.segments)
            raise ServeError(
                f"model {self.name} has an SLO of {self.slo:g} s, but a request waits for a batch, then for its own; "
                f"no share with the memory does two in that: the fastest takes {fastest:g} s. Give a larger SLO"
            )
        return found


class Placed(NamedTuple):
    """A model's segment on a GPU. slot: the first of its slots."""

    model: int
    segment: Segment
    slot: int


@dataclass(frozen=True)
class SharesPlan:
    """gpus: what lies on each. part: of each model's rate for which there is capacity; at most 1 is asked for.

    bound: there are no plans with fewer GPUs, or if their number was given, with more than this part. ended: no better
    plan exists; else the search was ended before it was proved.
    """

    gpus: tuple[tuple[Placed, ...], ...]
    part: float
    bound: float
    ended: bool


def plan_shares(
    models: Sequence[SharedModel], sharing: Sharing, gpus: int | None, memory: float, part: float, seconds: float
) -> SharesPlan:
    """The fewest GPUs with capacity for ``part`` of each rate; of such plans one with the smallest shares.

    gpus: if given, the largest equal part of all rates, up to ``part``, that this many GPUs have capacity for. memory:
    bytes of a GPU. seconds: after which the best plan so far counts. Raises ServeError if a model fits nowhere, not
    all find a place, or no plan was found in time.
    """
    end = time.monotonic() + seconds
    program = _Program(models, [one.best(sharing, memory) for one in models], sharing)
    first = program.solve(gpus, part, seconds)
    if first.values is None:
        raise ServeError("the search was ended before it found a plan; give it more seconds")
    bound = min(part, -first.bound)
    if gpus is None:
        bound = math.ceil(max(0.0, first.bound) - TOLERANCE)
        refuse_too_many(bound)
    count, reached = round(first.values[0]), float(first.values[1])
    if reached <= TOLERANCE:
        raise ServeError(f"{gpus} GPUs have no place for a share of each model; give more")
    ended = first.optimal or count == bound
    smaller = program.solve(count, reached, max(0.1, end - time.monotonic()), smallest=True)
    values = first.values if smaller.values is None else smaller.values
    return SharesPlan(program.layout(np.rint(values).astype(int)), reached, bound, ended)


def refuse_too_many(least: float) -> None:
    """Raise ServeError if a plan has at least so many GPUs that none is made."""
    if least > MOST_SHARED_GPUS:
        raise ServeError(
            f"the rates need at least {least:.0f} GPUs, and no plan is made for more than {MOST_SHARED_GPUS}; "
            "ask about smaller rates"
        )


class _Program:
    """Columns: the number of GPUs, the part of the rates, then arcs, idle arcs, and segments by model and size."""

    def __init__(self, models: Sequence[SharedModel], best: Sequence[Mapping[int, Segment]], sharing: Sharing):
        self._sharing = sharing
        used = sorted({size for one in best for size in one}, reverse=True)
        self._arcs = [(size, start) for size in used for start in sharing.shares[size][1]]
        ends = {start + sharing.shares[size][0] for size, start in self._arcs}
        nodes = sorted({0, sharing.slots, *ends, *(start for _, start in self._arcs)})
        self._chosen = [(number, one) for number, by_size in enumerate(best) for one in by_size.values()]
        idle = 2 + len(self._arcs)
        segments = idle + len(nodes) - 1
        self._first, self._columns = segments, segments + len(self._chosen)
        self._rows = Rows()
        flow: dict[int, dict[int, float]] = defaultdict(dict)
        flow[0][0], flow[sharing.slots][0] = -1.0, 1.0
        for column, (size, start) in enumerate(self._arcs, start=2):
            flow[start][column], flow[start + sharing.shares[size][0]][column] = 1.0, -1.0
        for column, (start, stop) in enumerate(itertools.pairwise(nodes), start=idle):
            flow[start][column], flow[stop][column] = 1.0, -1.0
        for node in nodes[:-1]:
            self._rows.add(list(flow[node]), list(flow[node].values()), 0.0, 0.0)
        columns = list(enumerate(self._chosen, start=segments))
        for size in used:
            arcs = [column for column, arc in enumerate(self._arcs, start=2) if arc[0] == size]
            its = [column for column, (_, one) in columns if one.size == size]
            # At least as many places as segments. With "just as many" HiGHS takes ten times as long.
            self._rows.add(arcs + its, [1.0] * len(arcs) + [-1.0] * len(its), 0.0, math.inf)
        for number, model in enumerate(models):
            capacities = {column: one.capacity / model.rate for column, (of, one) in columns if of == number}
            self._rows.add([1, *capacities], [-1.0, *capacities.values()], 0.0, math.inf)

    def solve(self, gpus: int | None, part: float, seconds: float, smallest: bool = False) -> Solution:
        """The fewest GPUs for ``part``; or the largest part on ``gpus``; or both held, the ``smallest`` shares."""
        cost, lower = np.zeros(self._columns), np.zeros(self._columns)
        upper, integers = np.full(self._columns, math.inf), np.ones(self._columns, dtype=bool)
        upper[0], upper[1] = (math.inf if gpus is None else gpus), part
        lower[1], integers[1] = (part if smallest or gpus is None else 0.0), False
        if smallest:
            cost[self._first :] = [one.size for _, one in self._chosen]
        elif gpus is None:
            cost[0] = 1.0
        else:
            cost[1] = -1.0
        return self._rows.least(cost, lower, upper, integers, seconds)

    def layout(self, values: np.ndarray) -> tuple[tuple[Placed, ...], ...]:
        """The paths of a solution, each with its segments."""
        waiting: dict[int, list[tuple[int, Segment]]] = defaultdict(list)
        for (number, one), count in zip(self._chosen, values[self._first :], strict=True):
            waiting[one.size] += [(number, one)] * int(count)
        arcs = Counter({arc: int(count) for arc, count in zip(self._arcs, values[2:], strict=False)})
        by_start: dict[int, list[int]] = defaultdict(list)
        for size, start in self._arcs:
            by_start[start].append(size)
        found = []
        while arcs.total():
            slot = 0
            placed: list[Placed] = []
            while slot < self._sharing.slots:
                size = next((size for size in by_start[slot] if arcs[size, slot]), 0)
                if not size:
                    slot += 1
                    continue
                arcs[size, slot] -= 1
                if waiting[size]:  # There may be more places than segments.
                    placed.append(Placed(*waiting[size].pop(), slot))
                slot += self._sharing.shares[size][0]
            found.append(tuple(placed))
        return tuple(gpu for gpu in found if gpu)
