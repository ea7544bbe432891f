"""How long batches take, if the times of single requests are known before: the profiles of Orloj's paper.

A profile has the times of the requests alone by source, and a map from the longest of a batch to the batch's time. A
batch is padded to its longest request (equation 4.4). So its time has the distribution of the largest of k times.
`symphony_serve.batching.orloj_learned` learns profiles of the batches that were seen instead. All times are seconds.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from symphony_serve.batching.orloj_histograms import BINS, Histogram
from symphony_serve.errors import ServeError


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
    times: Mapping[int, Histogram] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.sources:
            raise ServeError("a profile without a source: give the distribution of at least one")
        weights = dict.fromkeys(self.sources, 1.0) if self.weights is None else self.weights
        if weights.keys() != self.sources.keys() or not all(0 < weight < math.inf for weight in weights.values()):
            raise ServeError(f"weights {dict(weights)}: give one above 0 for each of {', '.join(self.sources)}")
        longest_of, times = self._longest(weights), dict[int, Histogram]()
        before = (0, 0.0)
        for size, (offset, scale) in self.batches.by_size.items():
            times[size] = longest_of(size).mapped(offset, scale)
            if times[size].mean < before[1] * (1 - 1e-9):
                raise ServeError(
                    f"a batch of {size} is expected to take {times[size].mean} s and one of {before[0]} takes "
                    f"{before[1]} s: give a map by which larger batches take longer"
                )
            before = (size, times[size].mean)
        object.__setattr__(self, "times", times)

    def _longest(self, weights: Mapping[str, float]) -> Callable[[int], Histogram]:
        """What says the longest time alone in a batch of a size."""
        return partial(largest, mixture(list(self.sources.values()), [weights[one] for one in self.sources]))


def point(value: float) -> Histogram:
    """Always ``value``."""
    return Histogram((value, value), (1.0,))


def common_edges(samples: Iterable[float]) -> tuple[float, ...]:
    """Edges of `BINS` bins of equal width from the smallest to the largest sample; of one narrow bin if all are one."""
    values = list(samples)
    low, high = min(values), max(values)
    if low == high:
        return (low, high)
    return (*(low + (high - low) * i / BINS for i in range(BINS)), high)


def binned(samples: Iterable[float], edges: Sequence[float]) -> Histogram:
    """The share of the samples in each bin. Raises ServeError if one lies outside the edges."""
    masses = [0.0] * (len(edges) - 1)
    for value in samples:
        if not edges[0] <= value <= edges[-1]:
            raise ServeError(f"sample {value}: the edges go from {edges[0]} to {edges[-1]}")
        masses[min(bisect_right(edges, value), len(masses)) - 1] += 1
    return Histogram(tuple(edges), tuple(masses))


def below_edges(histogram: Histogram) -> tuple[float, ...]:
    """P(time <= edge) of each edge; the first is 0, the last exactly 1."""
    return (*(min(1.0, mass) for mass in itertools.accumulate(histogram.masses[:-1], initial=0.0)), 1.0)


def cdf(histogram: Histogram, time: float) -> float:
    return _up_to(histogram, time, bisect_right(histogram.edges, time))


def cdf_before(histogram: Histogram, time: float) -> float:
    """P(a time is less than ``time``)."""
    return _up_to(histogram, time, bisect_left(histogram.edges, time))


def _up_to(histogram: Histogram, time: float, after: int) -> float:
    """The CDF at a time that lies before the edge ``after``, and not before the one in front of it."""
    if after == 0:
        return 0.0
    if after == len(histogram.edges):
        return 1.0
    left, right = histogram.edges[after - 1], histogram.edges[after]
    low, high = below_edges(histogram)[after - 1 : after + 1]
    return high if time == right else low + (high - low) * (time - left) / (right - left)


def mixture(histograms: Sequence[Histogram], weights: Sequence[float] | None = None) -> Histogram:
    """The time of a request of which only the weight of each histogram is known; None: equal weights. Exact."""
    if not histograms:
        raise ServeError("no histogram to mix: give at least one")
    shares = [1.0] * len(histograms) if weights is None else list(weights)
    total = math.fsum(shares)

    def mean(values: Sequence[float]) -> float:
        return math.fsum(share * value for share, value in zip(shares, values, strict=True)) / total

    return joined(histograms, mean)


def joined(histograms: Sequence[Histogram], join: Callable[[Sequence[float]], float]) -> Histogram:
    """The histogram whose CDF at each edge of the given ones is what ``join`` makes of theirs."""
    edges, below = [], []
    for edge in sorted({edge for histogram in histograms for edge in histogram.edges}):
        before = join([cdf_before(histogram, edge) for histogram in histograms])
        after = join([cdf(histogram, edge) for histogram in histograms])
        if after > before:
            edges.append(edge)
            below.append(before)
        edges.append(edge)
        below.append(after)
    return Histogram(tuple(edges), _steps(below))


def largest(histogram: Histogram, k: int) -> Histogram:
    """The largest of k independent times of one distribution: ``F(x)**k`` (equation 4.6)."""
    below = below_edges(histogram)
    missing = 0.0
    for i, (left, right) in enumerate(itertools.pairwise(histogram.edges)):
        low, high = below[i], below[i + 1]
        # The integral of F**k over a bin in which F is linear. Where F hardly rises the quotient would cancel.
        if high - low > 1e-9 * high:
            missing += (right - left) * (high ** (k + 1) - low ** (k + 1)) / ((k + 1) * (high - low))
        else:
            missing += (right - left) * ((low + high) / 2) ** k
    powers = [value**k for value in below]
    return Histogram(histogram.edges, _steps(powers), histogram.edges[-1] - missing)


def _steps(below: Sequence[float]) -> tuple[float, ...]:
    """The masses between values of a CDF. Rounding never makes one negative."""
    return tuple(max(0.0, after - before) for before, after in itertools.pairwise(below))
