"""The score of a request: the cost that the next batch saves with it, for each second of the worker's time.

Equation 4.1 of Orloj: ``p(t) = (E[C(t + tau + L)] - E[C(t + L)]) / E[L]``. C is the cost of ending at a time: 0 until
the deadline, then the cost of missing it. L is the batch's time. tau is how much longer a request waits that is not
chosen now, exponential with rate b. For one deadline D and slack ``s = D - t`` the numerator is the cost times
``E[1{L <= s} exp(-b (s - L))]``. The printed equation 4.2 is lost in the paper's text; this is its closed form by bins.

`score` is that form as it stands. `ScoreTable` is the same function of the slack, prepared: between two of its edges
it is ``carried * exp(-b x) + density * (1 - exp(-b x)) / b`` with x = slack - edge, so it only falls or only rises
there. No exponent is above 0, so nothing overflows at any time or deadline.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

from symphony_serve.batching.orloj_histograms import Histogram, Largest
from symphony_serve.errors import ServeError

#: One over the expected further wait of a request that is not chosen now, per second. Source: section 4.4.4 of the
#: paper, b = 1e-4 per ms. With it the score is nearly cost * P(the batch ends in time) / E[L].
ANTICIPATED_DELAY_RATE = 0.1


@dataclass(frozen=True)
class Cost:
    """What missing a request's deadline costs, in steps (appendix C.2): (seconds after the deadline, cost from there).

    The first step is at 0 seconds. Raises ServeError unless seconds and costs rise.
    """

    steps: tuple[tuple[float, float], ...] = ((0.0, 1.0),)

    def __post_init__(self) -> None:
        if not self.steps or self.steps[0][0] != 0:
            raise ServeError(f"steps {self.steps} of a cost: let the first be at 0 s after the deadline")
        before = (-math.inf, 0.0)
        for step in self.steps:
            if not (before[0] < step[0] < math.inf and before[1] < step[1] < math.inf):
                raise ServeError(f"step {step} of a cost follows {before}: give seconds and costs that rise")
            before = step

    def parts(self) -> list[tuple[float, float]]:
        """The one-step costs whose sum this is: (seconds after the deadline, cost of missing that moment)."""
        costs = [0.0, *(cost for _, cost in self.steps)]
        return [(after, costs[i + 1] - costs[i]) for i, (after, _) in enumerate(self.steps)]


#: The cost of a request that says nothing about it: 1 from the deadline on.
UNIT_COST = Cost()


def check_rate(b: float) -> float:
    """``b`` itself. Raises ServeError unless it is a finite number above 0."""
    if not 0 < b < math.inf:
        raise ServeError(f"b = {b}, the rate of the anticipated delay: give a finite number above 0")
    return b


def saving(histogram: Histogram, slack: float, b: float) -> float:
    """``E[1{L <= slack} exp(-b (slack - L))]``: equation 4.2 without cost and E[L], bin by bin."""
    total = 0.0
    for left, right, mass in zip(histogram.edges, histogram.edges[1:], histogram.masses, strict=False):
        end = min(slack, right)
        if end < left:
            continue
        # The mass is uniform over the width, so its part up to ``end`` counts. A width of 0 is a single value.
        part = -math.expm1(-b * (end - left)) / (b * (right - left)) if b * (right - left) > 0 else 1.0
        total += mass * math.exp(-b * (slack - end)) * part
    return total


def score(time: Largest, slack: float, b: float, cost: Cost = UNIT_COST) -> float:
    """The score of a request with ``slack`` seconds to its deadline in a batch that takes ``time``."""
    return math.fsum(part * saving(time.histogram, slack + after, b) for after, part in cost.parts()) / time.mean


@dataclass(frozen=True)
class ScoreTable:
    """The score as a function of the slack, for batches of one size and requests of one cost.

    Interval i is ``[edges[i], edges[i + 1])``, the last one has no end. Below ``edges[0]`` the score is 0.
    """

    edges: tuple[float, ...]
    #: By interval: the score at its beginning.
    carried: tuple[float, ...]
    #: By interval: the mass of the batch's time in it, times cost, divided by its width and by E[L].
    density: tuple[float, ...]
    b: float
    #: By interval: whether the score falls with the slack there, so that the earliest deadline is the best.
    falls: tuple[bool, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        falls = tuple(rate <= self.b * start for start, rate in zip(self.carried, self.density, strict=True))
        object.__setattr__(self, "falls", falls)

    @staticmethod
    def of(time: Largest, b: float, cost: Cost = UNIT_COST) -> ScoreTable:
        """The table for batches that take ``time``."""
        parts, given = cost.parts(), time.histogram
        jumps: dict[float, float] = {edge - after: 0.0 for edge in given.edges for after, _ in parts}
        for after, part in parts:
            for left, right, mass in zip(given.edges, given.edges[1:], given.masses, strict=False):
                jumps[left - after] += part * mass / time.mean if left == right else 0.0
        edges = sorted(jumps)
        carried, density = [], []
        value = 0.0
        for edge, following in zip(edges, [*edges[1:], math.inf], strict=True):
            value += jumps[edge]
            rate = 0.0
            if following < math.inf:
                middle = (edge + following) / 2
                rate = math.fsum(part * _density(given, middle + after) for after, part in parts) / time.mean
            carried.append(value)
            density.append(rate)
            value = value * math.exp(-b * (following - edge)) - rate * math.expm1(-b * (following - edge)) / b
        return ScoreTable(tuple(edges), tuple(carried), tuple(density), check_rate(b))

    def at(self, slack: float) -> float:
        """The score with this slack."""
        return self.within(self.interval(slack), slack)

    def interval(self, slack: float) -> int:
        """The interval in which this slack lies; -1 below the first edge."""
        return bisect_right(self.edges, slack) - 1

    def within(self, interval: int, slack: float) -> float:
        """The score with this slack, which is known to lie in ``interval``."""
        if interval < 0:
            return 0.0
        past = -self.b * (slack - self.edges[interval])
        return self.carried[interval] * math.exp(past) - self.density[interval] * math.expm1(past) / self.b

    def line(self, deadline: float, interval: int, base: float) -> tuple[float, float]:
        """(alpha, beta) with score = ``alpha * exp(b (t - base)) + beta`` while the slack is in ``interval``.

        This is the form of section 4.4.4, for the convex hull. Interval -1 is below the first edge.
        """
        if interval < 0:
            return 0.0, 0.0
        beta = self.density[interval] / self.b
        grown = math.exp(self.b * (self.edges[interval] - deadline + base))
        return (self.carried[interval] - beta) * grown, beta


def _density(histogram: Histogram, time: float) -> float:
    i = bisect_right(histogram.edges, time) - 1
    if not 0 <= i < len(histogram.masses):
        return 0.0
    return histogram.masses[i] / (histogram.edges[i + 1] - histogram.edges[i])
