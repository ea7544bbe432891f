"""Distributions of times as histograms.

A batch of a dynamic model is padded to its longest request (equation 4.4 of Orloj, chapter 4 of the dissertation
"Salus, Fluid, Orloj"). So a batch takes as long as the largest of its requests' times says, and that is a random
number before the batch has run. Nothing here knows of requests or deadlines. Times are in any one unit; the package
uses seconds.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

#: Bins of a histogram of samples. A bin of the workload orloj-1 is then 4 ms wide, a third of the standard deviation of
#: one of its peaks. To find the best requests costs one bisection for each bin.
BINS = 20


@dataclass(frozen=True)
class Histogram:
    """A distribution of times: ``masses[i]`` lies uniformly between ``edges[i]`` and ``edges[i + 1]``.

    Where both edges are equal, the mass is that of the single value. The masses are divided by their sum. mean: by
    default that of the masses. Of the largest of several times it is another one: within a bin that is not uniform.
    """

    edges: tuple[float, ...]
    masses: tuple[float, ...]
    mean: float = math.nan

    def __post_init__(self) -> None:
        total = math.fsum(self.masses)
        object.__setattr__(self, "masses", tuple(mass / total for mass in self.masses))
        if math.isnan(self.mean):
            middles = ((left + right) / 2 for left, right in itertools.pairwise(self.edges))
            mean = math.fsum(mass * middle for mass, middle in zip(self.masses, middles, strict=True))
            object.__setattr__(self, "mean", mean)

    @staticmethod
    def of_samples(samples: Iterable[float]) -> Histogram:
        """The share of the samples in each of `BINS` bins of equal width; of one narrow bin if all are one value.

        Empty bins that are neighbours become one bin.
        """
        values = sorted(samples)
        low, high = values[0], values[-1]
        if low == high:
            return Histogram((low, high), (1.0,))
        edges = [*(low + (high - low) * i / BINS for i in range(BINS)), high]
        counts = [0] * BINS
        for value in values:
            counts[min(bisect_right(edges, value), BINS) - 1] += 1
        kept: list[float] = [low]
        masses: list[float] = []
        for right, count in zip(edges[1:], counts, strict=True):
            if not count and masses and not masses[-1]:
                kept[-1] = right
                continue
            kept.append(right)
            masses.append(float(count))
        return Histogram(tuple(kept), tuple(masses))

    def mapped(self, offset: float, scale: float) -> Histogram:
        """The distribution of ``offset + scale * time`` (equation 4.9). ``scale`` is above 0."""
        edges = tuple(offset + scale * edge for edge in self.edges)
        return Histogram(edges, self.masses, offset + scale * self.mean)
