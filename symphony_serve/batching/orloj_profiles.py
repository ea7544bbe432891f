"""How long batches of a dynamic model take: the times of its requests alone, and a map from the longest to the batch.

A `VaryingProfile` is what `Orloj` is made with. A `Profiler` makes it anew from measurements (the long-term
feedback of section 4.3.2). All times are seconds.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from symphony_serve.batching.orloj_histograms import Histogram, Largest, common_edges, largest, mixture
from symphony_serve.errors import ServeError
from symphony_serve.messages import SAME_MOMENT_S, Request

logger = logging.getLogger(__name__)

#: Fewer samples of a source than this make no histogram: one for each bin.
ENOUGH_SAMPLES = 20
#: The newest samples of a source that are kept in each half of the window: 500 for each bin, 80 kB.
MOST_SAMPLES = 10_000
#: The profiler's memory in seconds, in two halves of which the older is forgotten at once. Azure's function traces,
#: which the paper uses, change within minutes.
WINDOW_S = 600.0
#: Seconds between two new profiles. The tables of five batch sizes take some milliseconds to make.
PICK_UP_S = 10.0
#: One of this many finished requests is run again alone, and at most one in this many seconds that the worker was busy.
ONE_OF, BUSY_S_FOR_ONE = 100, 10.0


@dataclass(frozen=True, slots=True)
class VaryingRequest(Request):
    """A request to a model whose times vary.

    source: the application that it comes from. Requests of one source have times of one distribution.
    cost: what missing its deadline costs, relative to other requests.
    """

    source: str = ""
    cost: float = 1.0


@dataclass(frozen=True)
class BatchMap:
    """The time of a batch of k is ``offset + scale * (its longest request's time alone)``, for each k of ``by_size``.

    by_size: size -> (offset in seconds, scale). An offset may be negative: where a part o of each request's time is
    shared by a batch and the rest is not, the offset is ``o - k * o`` and the scale k. Raises ServeError if there is no
    size, if one is below 1, if an offset is not finite, or if a scale is not above 0.
    """

    by_size: Mapping[int, tuple[float, float]]

    def __post_init__(self) -> None:
        if not self.by_size:
            raise ServeError("no batch size is supported: give at least one, mostly 1, 2, 4, 8 and 16")
        for size, (offset, scale) in self.by_size.items():
            if size < 1 or size != int(size):
                raise ServeError(f"batch size {size}: give whole numbers of at least 1")
            if not (math.isfinite(offset) and 0 < scale < math.inf):
                raise ServeError(
                    f"a batch of {size} takes {offset} s + {scale} * its longest request: give a finite offset and a "
                    "scale above 0"
                )
        object.__setattr__(self, "by_size", dict(sorted(self.by_size.items())))

    @staticmethod
    def fitted(measured: Iterable[tuple[int, float, float]]) -> BatchMap:
        """Least squares for each size over (size, longest time alone, seconds of the batch).

        A batch of one is by definition its time alone. Where all longest times of a size are equal, or where the line
        falls or is not above 0 at the shortest of them, the map is a scale without offset. Raises ServeError if nothing
        was measured or a time is not above 0.
        """
        by_size: dict[int, list[tuple[float, float]]] = {}
        for size, longest, seconds in measured:
            if not (0 < longest < math.inf and 0 < seconds < math.inf):
                raise ServeError(f"a batch of {size} with {longest} s took {seconds} s: give finite times above 0")
            by_size.setdefault(size, []).append((longest, seconds))
        return BatchMap({size: (0.0, 1.0) if size == 1 else _fit(points) for size, points in by_size.items()})


def _fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(offset, scale) of the line of least squares through (longest time alone, seconds)."""
    count = len(points)
    x, y = math.fsum(one for one, _ in points) / count, math.fsum(one for _, one in points) / count
    spread = math.fsum((one - x) ** 2 for one, _ in points)
    if spread > 1e-12 * count * x * x:
        scale = math.fsum((one - x) * (two - y) for one, two in points) / spread
        offset = y - scale * x
        if scale > 0 and offset + scale * min(one for one, _ in points) > 0:
            return offset, scale
    return 0.0, math.fsum(one * two for one, two in points) / math.fsum(one * one for one, _ in points)


@dataclass(frozen=True)
class VaryingProfile:
    """The distributions of the sources' times alone, and the map to the time of a batch.

    Each place of a batch is taken by a source at random.

    sources: source -> the distribution of the time of one of its requests alone.
    weights: source -> how often it takes a place, relative to the others; None: all the same, as in the paper. They
        change little (docs/serving-figures.md has them).
    enough: whether enough was measured to say how long a batch may take at the most.

    Raises ServeError if there is no source, if the weights are not those of the sources, or if a larger batch is
    expected to take less time than a smaller one.
    """

    batches: BatchMap
    sources: Mapping[str, Histogram]
    weights: Mapping[str, float] | None = None
    enough: bool = True
    #: size -> the time of a batch of this size.
    times: Mapping[int, Largest] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.sources:
            raise ServeError("a profile without a source: give the distribution of at least one")
        weights = dict.fromkeys(self.sources, 1.0) if self.weights is None else self.weights
        if weights.keys() != self.sources.keys() or not all(0 < weight < math.inf for weight in weights.values()):
            raise ServeError(f"weights {dict(weights)}: give one above 0 for each of {', '.join(self.sources)}")
        longest_of, times = self._longest(weights), dict[int, Largest]()
        before = (0, 0.0)
        for size, (offset, scale) in self.batches.by_size.items():
            longest = longest_of(size)
            times[size] = Largest(longest.histogram.mapped(offset, scale), offset + scale * longest.mean)
            if times[size].mean < before[1] * (1 - 1e-9):
                raise ServeError(
                    f"a batch of {size} is expected to take {times[size].mean} s and one of {before[0]} takes "
                    f"{before[1]} s: give a map by which larger batches take longer"
                )
            before = (size, times[size].mean)
        object.__setattr__(self, "times", times)

    def _longest(self, weights: Mapping[str, float]) -> Callable[[int], Largest]:
        """What says the longest time alone in a batch of a size."""
        return partial(largest, mixture(list(self.sources.values()), [weights[one] for one in self.sources]))

    def fetched(self, data: float) -> Mapping[int, Largest]:
        """The times of batches whose inputs take ``data`` seconds each to fetch before the batch."""
        return {
            size: Largest(time.histogram.mapped(data * size, 1.0), data * size + time.mean)
            for size, time in self.times.items()
        }


class Profiler:
    """Keeps the times of requests that ran alone, and says which finished requests should run again alone.

    batches: the map, as it was measured. given: distributions by source that are used until `ENOUGH_SAMPLES` of the
    source are there.

    A source with fewer samples has the distribution of all samples together. While there are fewer than
    `ENOUGH_SAMPLES` in all and none were given, only the smallest batches are formed.
    """

    def __init__(self, batches: BatchMap, given: Mapping[str, Histogram] | None = None, now: float = 0.0) -> None:
        self._batches = batches
        self._given = dict(given or {})
        self._halves: tuple[dict[str, deque[float]], dict[str, deque[float]]] = ({}, {})
        self._half_began = now
        self._picked_up = now
        self._news = False
        self._finished = 0
        self._busy = 0.0

    def finished(self, requests: Sequence[VaryingRequest], seconds: float, now: float) -> VaryingRequest | None:
        """A batch has taken ``seconds``. Returns a request of it that should run again alone when the worker is idle.

        A batch of one is itself a measurement.
        """
        self._busy += seconds
        if len(requests) == 1:
            self.ran_alone(requests[0].source, seconds, now)
            return None
        before, self._finished = self._finished, self._finished + len(requests)
        if self._finished < ONE_OF or self._busy < BUSY_S_FOR_ONE:
            return None
        self._finished, self._busy = 0, 0.0
        return requests[max(0, ONE_OF - 1 - before) % len(requests)]

    def ran_alone(self, source: str, seconds: float, now: float) -> None:
        """A request of the source took this long alone. Raises ServeError unless that is a finite time above 0."""
        if not 0 < seconds < math.inf:
            raise ServeError(f"a request of {source!r} took {seconds} s alone: give a finite time above 0")
        if now - self._half_began >= WINDOW_S / 2:
            self._halves = (self._halves[1], {})
            self._half_began = now
        self._halves[1].setdefault(source, deque(maxlen=MOST_SAMPLES)).append(seconds)
        self._news = True

    def picked_up(self, now: float) -> VaryingProfile | None:
        """The new profile, at most once in `PICK_UP_S` and only if there are new measurements."""
        if not self._news or now - self._picked_up < PICK_UP_S:
            return None
        try:
            profile = self.profile()
        except ServeError as error:
            logger.warning("The profile stays as it is: %s", error)
            profile = None
        self._news, self._picked_up = False, now
        return profile

    def profile(self) -> VaryingProfile:
        """What is known now."""
        samples: dict[str, list[float]] = {source: [] for source in self._given}
        for half in self._halves:
            for source, newest in half.items():
                samples.setdefault(source, []).extend(newest)
        pool = [value for values in samples.values() for value in values]
        edges = common_edges(pool) if pool else ()
        sources = {}
        for source, values in samples.items():
            if len(values) >= ENOUGH_SAMPLES:
                sources[source] = Histogram.of_samples(values, edges)
            elif source in self._given:
                sources[source] = self._given[source]
            elif len(pool) >= ENOUGH_SAMPLES:
                sources[source] = Histogram.of_samples(pool, edges)
        if sources:
            return VaryingProfile(self._batches, sources)
        # An unknown time is taken for none, so that nothing is given up before its deadline.
        alone = Histogram.of_samples(pool, edges) if pool else Histogram.point(SAME_MOMENT_S)
        smallest = next(iter(self._batches.by_size.items()))
        return VaryingProfile(BatchMap(dict([smallest])), {"": alone}, enough=False)
