"""The pending requests of one model, and which of them score highest for a batch size.

Requests of a batch size k all have the same batch time L_k, so a request is its key (deadline, number) and its cost.
The queue Q_k of the paper is the pending requests that are feasible for k: with ``now <= deadline - E[L_k]``, so a
queue is a tail of the requests in the order of their deadlines. The highest scores are found from the ends of the
intervals of `ScoreTable`, between which the score only rises or only falls. (The paper's convex hulls are in
`benchmarks.orloj_hull`.) All scores that are compared are exact at the moment that is asked for. Equal scores: the
earlier deadline, then the smaller number.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from symphony_serve.batching.orloj_histograms import Largest
from symphony_serve.batching.orloj_scores import ScoreTable
from symphony_serve.errors import ServeError

#: A request as the queues know it: (deadline, number). Numbers are unique and rise with the arrivals.
Key = tuple[float, int]


def first_feasible(keys: list[Key], now: float, mean: float) -> int:
    """The index of the first request with ``now <= deadline - mean``, in exactly this form: sums round differently."""
    at = bisect_left(keys, (now + mean, -math.inf))
    while at < len(keys) and keys[at][0] - mean < now:
        at += 1
    while at > 0 and keys[at - 1][0] - mean >= now:
        at -= 1
    return at


class Pending:
    """The pending requests, in one list for each cost, by (deadline, number).

    ``times``: the time of a batch by its size. ``b``: the rate of the anticipated delay, per second. Raises ServeError
    unless it is a finite number above 0.
    """

    def __init__(self, times: Mapping[int, Largest], b: float) -> None:
        if not 0 < b < math.inf:
            raise ServeError(f"b = {b}, the rate of the anticipated delay: give a finite number above 0")
        self.b = b
        self.times = dict(times)
        #: cost -> its requests by (deadline, number). No list is empty.
        self.by_cost: dict[float, list[Key]] = {}
        #: number -> (deadline, cost), the same requests.
        self.costs: dict[int, tuple[float, float]] = {}
        #: By batch size.
        self._tables: dict[int, ScoreTable] = {}

    def __len__(self) -> int:
        return len(self.costs)

    def __contains__(self, number: int) -> bool:
        return number in self.costs

    def insert(self, deadline: float, number: int, cost: float = 1.0) -> None:
        """Take in a request. Raises ServeError if the number is pending already, or if the cost is none."""
        if number in self.costs:
            raise ServeError(f"request {number} is pending already: give each request another number")
        if not 0 < cost < math.inf:
            raise ServeError(f"request {number} has the cost {cost}: give a finite number above 0")
        self.costs[number] = (deadline, cost)
        insort(self.by_cost.setdefault(cost, []), (deadline, number))

    def remove(self, number: int) -> None:
        """Forget a request. Raises KeyError if it is not pending."""
        deadline, cost = self.costs.pop(number)
        keys = self.by_cost[cost]
        del keys[bisect_left(keys, (deadline, number))]
        if not keys:
            del self.by_cost[cost]

    def replace(self, times: Mapping[int, Largest]) -> None:
        """From now on batches take ``times``."""
        self.times = dict(times)
        self._tables.clear()

    def count(self, size: int, now: float) -> int:
        """How many requests are feasible for this batch size."""
        mean = self.times[size].mean
        return sum(len(keys) - first_feasible(keys, now, mean) for keys in self.by_cost.values())

    def earliest(self, size: int, now: float) -> Key | None:
        """The request with the earliest deadline of those that are feasible for this size; None if there is none."""
        mean = self.times[size].mean
        heads = []
        for keys in self.by_cost.values():
            at = first_feasible(keys, now, mean)
            if at < len(keys):
                heads.append(keys[at])
        return min(heads, default=None)

    def late(self, now: float) -> list[int]:
        """Remove the requests that are feasible for no batch size. Returns their numbers, by deadline."""
        mean = min(time.mean for time in self.times.values())
        gone = [key for keys in self.by_cost.values() for key in keys[: first_feasible(keys, now, mean)]]
        for _, number in gone:
            self.remove(number)
        return [number for _, number in sorted(gone)]

    def take(self, size: int, now: float) -> list[int]:
        """Remove the ``size`` feasible requests with the highest scores. Returns their numbers, best first."""
        chosen = self.best(size, now)
        for number in chosen:
            self.remove(number)
        return chosen

    def best(self, size: int, now: float) -> list[int]:
        """The numbers that `take` would return. Time does not go back from one call to the next.

        Merges the intervals of the score, each from its better end: O(K log n + k log K) for k of n requests and K
        bins.
        """
        mean = self.times[size].mean
        ends: list[tuple[float, float, int, Iterator[tuple[float, float, int]]]] = []
        for cost, keys in self.by_cost.items():
            low = first_feasible(keys, now, mean)
            if low < len(keys):
                for walk in self._intervals(size, cost, keys, low, now):
                    ends.append((*next(walk), walk))
        heapq.heapify(ends)
        chosen: list[int] = []
        while ends and len(chosen) < size:
            _, _, number, walk = ends[0]
            chosen.append(number)
            following = next(walk, None)
            if following is None:
                heapq.heappop(ends)
            else:
                heapq.heapreplace(ends, (*following, walk))
        return chosen

    def _intervals(
        self, size: int, cost: float, keys: list[Key], low: int, now: float
    ) -> Iterator[Iterator[tuple[float, float, int]]]:
        """For each interval of the slack that has requests: (-score, deadline, number) of them, the best first."""
        if size not in self._tables:
            self._tables[size] = ScoreTable.of(self.times[size], self.b)
        table = self._tables[size]
        edges = table.edges
        interval = table.interval(keys[low][0] - now)
        while low < len(keys):
            after = interval + 1
            high = bisect_left(keys, (now + edges[after], -math.inf), low) if after < len(edges) else len(keys)
            if high > low:
                yield _walk(table, interval, cost, keys, low, high, now)
            low, interval = high, after


def _walk(
    table: ScoreTable, interval: int, cost: float, keys: list[Key], low: int, high: int, now: float
) -> Iterator[tuple[float, float, int]]:
    """The requests ``keys[low:high]`` of one interval, the best first, as (-score, deadline, number)."""
    if interval < 0 or table.falls[interval]:
        for deadline, number in keys[low:high]:
            yield -cost * table.within(interval, deadline - now), deadline, number
        return
    while high > low:
        deadline = keys[high - 1][0]
        start = bisect_left(keys, (deadline, -math.inf), low, high)
        value = -cost * table.within(interval, deadline - now)
        for _, number in keys[start:high]:
            yield value, deadline, number
        high = start
