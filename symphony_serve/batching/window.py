"""Batches of at least a target size: the heads that would keep a batch smaller are given up (Nexus' sliding window).

This is the default of Symphony's public code. The paper calls it and `benchmarks.rival_servers.fifo` equally good;
they are not (docs/serving-figures.md has them).
"""

from __future__ import annotations

import math
from bisect import insort_right

from symphony_serve.batching import BatchFormer, Candidate
from symphony_serve.delays import Delays
from symphony_serve.errors import ServeError
from symphony_serve.messages import Reason, Refuse, Request
from symphony_serve.profiles import Profile

#: The removed heads at the front of the list are cut off when they are more than this and half of the list, so each
#: request is moved at most once on average.
SPARE_HEADS = 64


class Window(BatchFormer):
    """A run of the earliest deadlines that has the target size, or as many requests as can still be served.

    profile: of the model on its GPU. slo: seconds within which its requests are to be answered.
    delays: a batch must end ``delays.margin`` before its first deadline.
    """

    def __init__(self, profile: Profile, slo: float, delays: Delays):
        self._slo = slo
        self._delays = delays
        #: (latest end, id, request), ascending. Those before ``_head`` have left.
        self._queue: list[tuple[float, int, Request]] = []
        self._head = 0
        #: Place in the queue from which on all requests fit into one batch. It never goes back while the profile is the
        #: same and no request is removed: a later start or more requests only move it on.
        self._fits = 0
        self._refused: list[Refuse] = []
        #: Of the latest candidate: its size, and the last moment at which it may start.
        self._size = 0
        self._latest = math.inf
        self._rate: float | None = None
        #: b*, the size below which a batch is only run if no larger one can be.
        self.target = 1
        self.set_profile(profile)

    def set_profile(self, profile: Profile) -> None:
        self._profile, self._table = profile, profile.table
        self._fits = 0
        self._find_target()

    def set_rate(self, rate: float) -> None:
        if rate != self._rate:
            self._rate = rate
            self._find_target()

    def _find_target(self) -> None:
        self.target = target_batch(self._profile, self._rate, self._slo - self._delays.response)
        self._size = 0

    def add(self, request: Request) -> None:
        if not math.isfinite(request.deadline):
            raise ServeError(f"request {request.id} has the deadline {request.deadline} s: give a finite time")
        queue = self._queue
        entry = (request.deadline - self._delays.margin, request.id, request)
        if not queue or entry > queue[-1]:
            queue.append(entry)
        else:
            insort_right(queue, entry, self._head)
        self._size = 0

    def remove(self, request_id: int) -> Request | None:
        for place in range(self._head, len(self._queue)):
            if self._queue[place][1] == request_id:
                self._fits = self._size = 0
                return self._queue.pop(place)[2]
        return None

    def form(self, start: float) -> Candidate | None:
        self._size = size = self._gather(start)
        self._cut()
        if size == 0:
            self._latest = math.inf
            return None
        deadline, seconds = self._queue[self._head][0], self._table[size]
        self._latest = deadline - seconds
        return Candidate(size, deadline, seconds, self._table[size + 1], overlap=self._profile.overlap(size))

    def _gather(self, start: float) -> int:
        """Give up heads, and return the size of the batch; 0 if the queue is empty now."""
        queue, table = self._queue, self._table
        count = len(queue)
        fits = max(self._fits, self._head, count - (len(table) - 2))
        while fits < count and start > queue[fits][0] - table[count - fits]:
            fits += 1
        self._fits = fits
        size = min(self.target, count - fits)
        if size == 0:
            while self._head < count:
                self._give_up_head(start)
            return 0
        needed = table[size]
        while start > queue[self._head][0] - needed:
            self._give_up_head(start)
        return self._largest(start, size)

    def _largest(self, start: float, size: int) -> int:
        """The largest batch that the present head allows at ``start``. One of ``size`` is known to be allowed."""
        deadline, table = self._queue[self._head][0], self._table
        most = min(len(self._queue) - self._head, len(table) - 2)
        while size < most and start <= deadline - table[size + 1]:
            size += 1
        return size

    def _cut(self) -> None:
        if self._head > SPARE_HEADS and 2 * self._head > len(self._queue):
            del self._queue[: self._head]
            self._fits = max(0, self._fits - self._head)
            self._head = 0

    def _give_up_head(self, start: float) -> None:
        latest_end, _, request = self._queue[self._head]
        alone = start <= latest_end - self._table[1]
        self._refused.append(Refuse(request, Reason.MAKES_WAY if alone else Reason.LATE))
        self._head += 1

    def changes_at(self) -> float:
        return self._latest

    def take(self) -> tuple[Request, ...]:
        begin, self._head = self._head, self._head + self._size
        taken = tuple([entry[2] for entry in self._queue[begin : self._head]])
        self._size = 0
        self._cut()
        return taken

    def refused(self) -> list[Refuse]:
        if not self._refused:
            return []
        told, self._refused = self._refused, []
        return told

    def waiting(self) -> tuple[Request, ...]:
        return tuple(entry[2] for entry in self._queue[self._head :])

    def __len__(self) -> int:
        return len(self._queue) - self._head


def target_batch(profile: Profile, rate: float | None, budget: float) -> int:
    """b*, the batch size that a model needs at ``rate`` requests per second.

    ``n = rate*l(b)/b`` GPUs serve batches of b back to back. Staggered, they let a request wait l(b)/n for the start of
    its batch, which then takes l(b): equation 1, ``l(b)*(1 + 1/n) <= budget``, with n of at least 1. (Of a pipeline's
    l(b), only the part counts that keeps it from starting the next batch: ``n = rate*part*l(b)/b``.) b* is the last
    size before the first that breaks it. If its n is at most 1, one GPU is enough and a batch waits until its requests
    have come: b* is the largest b with ``l(b) + b/rate <= budget``. If ``rate`` is None or 0 (unknown), b* is the
    largest b with ``l(b) <= budget/2``. Source: the public code's batch size estimator.
    """
    table = profile.table
    if not rate:
        return max(1, profile.largest(budget / 2))
    target = 1
    for size in range(1, profile.max_batch + 1):
        part = profile.part(size)
        gpus = rate * table[size] * part / size
        if table[size] * (1 + part / max(1.0, gpus)) > budget:
            break
        target = size
    if rate * table[target] * profile.part(target) / target > 1 or math.isinf(rate):
        return target
    fitting = (size for size in range(profile.max_batch, 0, -1) if table[size] + size / rate <= budget)
    return next(fitting, 1)
