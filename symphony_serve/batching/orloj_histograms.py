"""Distributions of times as histograms, and the distribution of the largest of k times.

A batch of a dynamic model is padded to its longest request (equation 4.4 of Orloj, chapter 4 of the dissertation
"Salus, Fluid, Orloj"). So a batch takes as long as the largest of its requests' times says, and that is a random
number before the batch has run. Nothing here knows of requests or deadlines. Times are in any one unit; the package
uses seconds.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from symphony_serve.errors import ServeError

#: Bins of a histogram of samples. A bin of the workload orloj-1 is then 4 ms wide, a third of the standard deviation of
#: one of its peaks. To find the best requests costs one bisection for each bin.
BINS = 20


@dataclass(frozen=True)
class Histogram:
    """A distribution of times: ``masses[i]`` lies uniformly between ``edges[i]`` and ``edges[i + 1]``.

    Where both edges are equal, the mass is that of the single value. The masses are divided by their sum.

    Raises ServeError if an edge or a mass is not a finite number of at least 0, if an edge is below the one before it,
    if there is not one edge more than masses, or if all masses are 0.
    """

    edges: tuple[float, ...]
    masses: tuple[float, ...]
    #: P(time <= edges[i]); the first is 0, the last exactly 1.
    below: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        edges, masses = tuple(map(float, self.edges)), tuple(map(float, self.masses))
        if len(masses) < 1 or len(edges) != len(masses) + 1:
            raise ServeError(f"{len(edges)} edges for {len(masses)} masses: give one edge more than masses, at least 2")
        for name, values in (("edge", edges), ("mass", masses)):
            wrong = next((value for value in values if not 0 <= value < math.inf), None)
            if wrong is not None:
                raise ServeError(f"{name} {wrong} of a histogram: give a finite number that is at least 0")
        for before, after in itertools.pairwise(edges):
            if not before <= after:
                raise ServeError(f"edge {after} of a histogram follows {before}: give edges that do not fall")
        total = math.fsum(masses)
        if total <= 0:
            raise ServeError("all masses of a histogram are 0: give at least one that is larger")
        masses = tuple(mass / total for mass in masses)
        below = [0.0]
        for mass in masses:
            below.append(min(1.0, below[-1] + mass))
        below[-1] = 1.0
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "masses", masses)
        object.__setattr__(self, "below", tuple(below))

    @staticmethod
    def point(value: float) -> Histogram:
        """Always ``value``."""
        if not 0 < value < math.inf:
            raise ServeError(f"time {value}: give a finite time above 0")
        return Histogram((value, value), (1.0,))

    @staticmethod
    def of_samples(samples: Iterable[float], edges: Sequence[float] | None = None) -> Histogram:
        """The share of the samples in each bin; ``edges``: those of `common_edges`, made of these samples if None.

        Empty bins that are neighbours become one bin. Raises ServeError if there is no sample, if one is not above 0
        or if it lies outside the edges.
        """
        values = sorted(samples)
        edges = common_edges(values) if edges is None else edges
        if not values:
            raise ServeError("no sample of a time: give at least one")
        if not edges[0] <= values[0] or not values[-1] <= edges[-1]:
            raise ServeError(f"samples from {values[0]} to {values[-1]}: the edges go from {edges[0]} to {edges[-1]}")
        counts = [0] * (len(edges) - 1)
        for value in values:
            counts[min(bisect_right(edges, value), len(counts)) - 1] += 1
        kept: list[float] = [edges[0]]
        masses: list[float] = []
        for i, count in enumerate(counts):
            if not count and masses and not masses[-1]:
                kept[-1] = edges[i + 1]
                continue
            kept.append(edges[i + 1])
            masses.append(float(count))
        return Histogram(tuple(kept), tuple(masses))

    def cdf(self, time: float) -> float:
        return self._below(time, bisect_right(self.edges, time))

    def cdf_before(self, time: float) -> float:
        """P(a time is less than ``time``)."""
        return self._below(time, bisect_left(self.edges, time))

    def _below(self, time: float, after: int) -> float:
        """The CDF at a time that lies before the edge ``after``, and not before the one in front of it."""
        if after == 0:
            return 0.0
        if after == len(self.edges):
            return 1.0
        left, right = self.edges[after - 1], self.edges[after]
        low, high = self.below[after - 1], self.below[after]
        return high if time == right else low + (high - low) * (time - left) / (right - left)

    @property
    def mean(self) -> float:
        middles = ((left + right) / 2 for left, right in itertools.pairwise(self.edges))
        return math.fsum(mass * middle for mass, middle in zip(self.masses, middles, strict=True))

    def mapped(self, offset: float, scale: float) -> Histogram:
        """The distribution of ``offset + scale * time`` (equation 4.9). ``scale`` is above 0."""
        return Histogram(tuple(offset + scale * edge for edge in self.edges), self.masses)


@dataclass(frozen=True)
class Largest:
    """The largest of several times: its histogram, and its exact mean.

    The mean is not `histogram.mean`: within a bin of the histogram the largest is not uniform.
    """

    histogram: Histogram
    mean: float


def common_edges(samples: Iterable[float], bins: int = BINS) -> tuple[float, ...]:
    """Edges of ``bins`` bins of equal width from the smallest to the largest sample; of one narrow bin if all are one.

    Raises ServeError if there is no sample or if one is not a finite number above 0.
    """
    values = list(samples)
    if not values:
        raise ServeError("no sample of a time: give at least one")
    wrong = next((value for value in values if not 0 < value < math.inf), None)
    if wrong is not None:
        raise ServeError(f"sample {wrong} of a time: give a finite time above 0")
    low, high = min(values), max(values)
    if low == high:
        return (low, high)
    return (*(low + (high - low) * i / bins for i in range(bins)), high)


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
        before = join([histogram.cdf_before(edge) for histogram in histograms])
        after = join([histogram.cdf(edge) for histogram in histograms])
        if after > before:
            edges.append(edge)
            below.append(before)
        edges.append(edge)
        below.append(after)
    return Histogram(tuple(edges), _steps(below))


def largest(histogram: Histogram, k: int) -> Largest:
    """The largest of k independent times of one distribution: ``F(x)**k`` (equation 4.6)."""
    if k < 1:
        raise ServeError(f"the largest of {k} times: give at least 1")
    below = histogram.below
    missing = 0.0
    for i, (left, right) in enumerate(itertools.pairwise(histogram.edges)):
        low, high = below[i], below[i + 1]
        # The integral of F**k over a bin in which F is linear. Where F hardly rises the quotient would cancel.
        if high - low > 1e-9 * high:
            missing += (right - left) * (high ** (k + 1) - low ** (k + 1)) / ((k + 1) * (high - low))
        else:
            missing += (right - left) * ((low + high) / 2) ** k
    powers = [value**k for value in below]
    return Largest(Histogram(histogram.edges, _steps(powers)), histogram.edges[-1] - missing)


def _steps(below: Sequence[float]) -> tuple[float, ...]:
    """The masses between values of a CDF. Rounding never makes one negative."""
    return tuple(max(0.0, after - before) for before, after in itertools.pairwise(below))
