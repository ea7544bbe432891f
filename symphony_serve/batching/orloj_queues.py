"""The pending requests of one model, and which of them score highest for a batch size.

Requests of a batch size k all have the same batch time L_k, so a request is its key (deadline, number).
The queue Q_k of the paper is the pending requests that are feasible for k: with ``now <= deadline - E[L_k]``, so a
queue is a tail of the requests in the order of their deadlines. The highest scores are found from the ends of the
intervals of `ScoreTable`, between which the score only rises or only falls. (The paper's convex hulls are in
`benchmarks.orloj_hull`.) All scores that are compared are exact at the moment that is asked for. Equal scores: the
earlier deadline, then the smaller number.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.batching.orloj_scores import ScoreTable
from symphony_serve.errors import ServeError

#: A request as the queues know it: (deadline, number). Numbers are unique and rise with the arrivals.
Key = tuple[float, int]


def first_feasible(keys: list[Key], now: float, mean: float) -> int:
    """The index of the first request with ``now <= deadline - mean``, in exactly this form: sums round differently."""
    return bisect_left(keys, now, key=lambda one: one[0] - mean)


class Pending:
    """The pending requests by (deadline, number).

    ``times``: the time of a batch by its size. ``b``: the rate of the anticipated delay, per second, above 0.
    """

    def __init__(self, times: Mapping[int, Histogram], b: float) -> None:
        self.b = b
        self.times = dict(times)
        self.keys: list[Key] = []
        #: number -> deadline, the same requests.
        self.deadlines: dict[int, float] = {}
        #: By batch size.
        self._tables: dict[int, ScoreTable] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, number: int) -> bool:
        return number in self.deadlines

    def insert(self, deadline: float, number: int) -> None:
        """Take in a request. Raises ServeError if the number is pending already."""
        if number in self.deadlines:
            raise ServeError(f"request {number} is pending already: give each request another number")
        self.deadlines[number] = deadline
        insort(self.keys, (deadline, number))

    def remove(self, number: int) -> None:
        """Forget a request. Raises KeyError if it is not pending."""
        del self.keys[bisect_left(self.keys, (self.deadlines.pop(number), number))]

    def count(self, size: int, now: float) -> int:
        """How many requests are feasible for this batch size."""
        return len(self.keys) - first_feasible(self.keys, now, self.times[size].mean)

    def earliest(self, size: int, now: float) -> Key | None:
        """The request with the earliest deadline of those that are feasible for this size; None if there is none."""
        at = first_feasible(self.keys, now, self.times[size].mean)
        return self.keys[at] if at < len(self.keys) else None

    def late(self, now: float) -> list[int]:
        """Remove the requests that are feasible for no batch size. Returns their numbers, by deadline."""
        mean = min(time.mean for time in self.times.values())
        gone = [number for _, number in self.keys[: first_feasible(self.keys, now, mean)]]
        for number in gone:
            self.remove(number)
        return gone

    def best(self, size: int, now: float) -> list[int]:
        """The ``size`` feasible requests with the highest scores, by their numbers, the best first.

        Time does not go back from one call to the next. Merges the intervals of the score, each from its better end:
        O(K log n + k log K) for k of n requests and K bins.
        """
        low = first_feasible(self.keys, now, self.times[size].mean)
        best = heapq.merge(*self._intervals(size, low, now))
        return [number for _, _, number in itertools.islice(best, size)]

    def _intervals(self, size: int, low: int, now: float) -> Iterator[Iterator[tuple[float, float, int]]]:
        """For each interval of the slack that has requests: (-score, deadline, number) of them, the best first.

        Only the requests from the place ``low`` on count.
        """
        keys = self.keys
        if low == len(keys):
            return
        if size not in self._tables:
            self._tables[size] = ScoreTable.of(self.times[size], self.b)
        table = self._tables[size]
        edges = table.edges
        interval = table.interval(keys[low][0] - now)
        while low < len(keys):
            after = interval + 1
            high = bisect_left(keys, (now + edges[after], -math.inf), low) if after < len(edges) else len(keys)
            if high > low:
                yield _walk(table, interval, keys, low, high, now)
            low, interval = high, after


def _walk(
    table: ScoreTable, interval: int, keys: list[Key], low: int, high: int, now: float
) -> Iterator[tuple[float, float, int]]:
    """The requests ``keys[low:high]`` of one interval, the best first, as (-score, deadline, number)."""
    if table.falls(interval):
        for deadline, number in keys[low:high]:
            yield -table.within(interval, deadline - now), deadline, number
        return
    while high > low:
        deadline = keys[high - 1][0]
        start = bisect_left(keys, (deadline, -math.inf), low, high)
        value = -table.within(interval, deadline - now)
        for _, number in keys[start:high]:
            yield value, deadline, number
        high = start
