"""The score of Orloj by its definition, and the queue that computes it for each request: what others are compared with.

`symphony_serve.batching.orloj_scores` derives the score and has it as a table.
"""

from __future__ import annotations

import math

from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.batching.orloj_queues import Pending, first_feasible


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


def score(time: Histogram, slack: float, b: float) -> float:
    """The score of a request with ``slack`` seconds to its deadline in a batch that takes ``time``."""
    return saving(time, slack, b) / time.mean


class NaivePending(Pending):
    """Computes the score of each feasible request by its definition and sorts them all."""

    def best(self, size: int, now: float) -> list[int]:
        time = self.times[size]
        feasible = self.keys[first_feasible(self.keys, now, time.mean) :]
        scored = [(-score(time, deadline - now, self.b), deadline, number) for deadline, number in feasible]
        return [number for _, _, number in sorted(scored)[:size]]
