"""Profiles by which each source takes an equal share of a batch's places, as in the toy example of Orloj's paper.

`VaryingProfile` lets each place be taken at random instead.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence

from benchmarks.orloj_profiles import VaryingProfile, cdf, joined
from symphony_serve.batching.orloj_histograms import Histogram

#: The positive half of the nodes and weights of 8-point Gauss-Legendre quadrature on [-1, 1] (Abramowitz and Stegun,
#: table 25.4). It is exact for polynomials up to degree 15.
_GAUSS = (
    (0.1834346424956498, 0.3626837833783620),
    (0.5255324099163290, 0.3137066458778873),
    (0.7966664774136267, 0.2223810344533745),
    (0.9602898564975363, 0.1012285362903763),
)


def largest_of_each(histograms: Sequence[Histogram], powers: Sequence[float] | None = None) -> Histogram:
    """The largest of independent times of several distributions: ``prod F_i(x)**powers[i]``; None: all powers are 1.

    Equation 4.8 says the same as a signed sum over all 2**k subsets of the batch, whose terms cancel. The product costs
    the number of histograms times the number of bins.
    """
    exponents = [1.0] * len(histograms) if powers is None else list(powers)
    pairs = list(zip(histograms, exponents, strict=True))

    def product(time: float) -> float:
        return math.prod(cdf(histogram, time) ** power for histogram, power in pairs)

    found = joined(histograms, lambda values: math.prod(map(operator.pow, values, exponents)))
    missing = 0.0
    for left, right in itertools.pairwise(found.edges):
        middle, half = (left + right) / 2, (right - left) / 2
        missing += half * math.fsum(w * (product(middle - half * x) + product(middle + half * x)) for x, w in _GAUSS)
    return Histogram(found.edges, found.masses, found.edges[-1] - missing)


class ProductProfile(VaryingProfile):
    """Each source takes k divided by the number of sources of the places of a batch of k."""

    def _longest(self, weights: Mapping[str, float]) -> Callable[[int], Histogram]:
        histograms, total = list(self.sources.values()), math.fsum(weights.values())
        return lambda size: largest_of_each(histograms, [size * weights[one] / total for one in self.sources])
