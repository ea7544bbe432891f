"""The score of a request: the cost that the next batch saves with it, for each second of the worker's time.

Equation 4.1 of Orloj: ``p(t) = (E[C(t + tau + L)] - E[C(t + L)]) / E[L]``. C is the cost of ending at a time: 0 until
the deadline, then the cost of missing it. L is the batch's time. tau is how much longer a request waits that is not
chosen now, exponential with rate b. For one deadline D and slack ``s = D - t`` the numerator is the cost times
``E[1{L <= s} exp(-b (s - L))]``. The printed equation 4.2 is lost in the paper's text; this is its closed form by bins.

Between two edges of L the score is ``carried * exp(-b x) + density * (1 - exp(-b x)) / b`` with x = slack - edge, so it
only falls or only rises there. No exponent is above 0, so nothing overflows at any time or deadline.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from symphony_serve.batching.orloj_histograms import Histogram


@dataclass(frozen=True)
class ScoreTable:
    """The score as a function of the slack, for batches of one size.

    Interval i is ``[edges[i], edges[i + 1])``, the last one has no end. Below ``edges[0]`` the score is 0.
    """

    edges: tuple[float, ...]
    #: By interval: the score at its beginning.
    carried: tuple[float, ...]
    #: By interval: the mass of the batch's time in it, divided by its width and by E[L].
    density: tuple[float, ...]
    #: The rate of the anticipated delay, per second.
    b: float

    @staticmethod
    def of(time: Histogram, b: float) -> ScoreTable:
        """The table for batches that take ``time``."""
        edges, carried, density = [], [], []
        value = 0.0
        for left, right, mass in zip(time.edges, time.edges[1:], time.masses, strict=False):
            if left == right:
                value += mass / time.mean
                continue
            rate = mass / (right - left) / time.mean
            edges.append(left)
            carried.append(value)
            density.append(rate)
            value = value * math.exp(-b * (right - left)) - rate * math.expm1(-b * (right - left)) / b
        return ScoreTable((*edges, time.edges[-1]), (*carried, value), (*density, 0.0), b)

    def interval(self, slack: float) -> int:
        """The interval in which this slack lies; -1 below the first edge."""
        return bisect_right(self.edges, slack) - 1

    def falls(self, interval: int) -> bool:
        """Whether the score falls with the slack in the interval, so that the earliest deadline is the best."""
        return interval < 0 or self.density[interval] <= self.b * self.carried[interval]

    def within(self, interval: int, slack: float) -> float:
        """The score with this slack, which is known to lie in ``interval``."""
        if interval < 0:
            return 0.0
        past = -self.b * (slack - self.edges[interval])
        return self.carried[interval] * math.exp(past) - self.density[interval] * math.expm1(past) / self.b
