"""The requests of one model in the order of their deadlines: for `window` and `benchmarks.rival_servers.fifo`."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from bisect import insort_right

from symphony_serve.batching import BatchFormer, Candidate
from symphony_serve.delays import Delays
from symphony_serve.errors import ServeError
from symphony_serve.messages import Reason, Refuse, Request
from symphony_serve.profiles import Profile

#: The removed heads at the front of the list are cut off when they are this many and half of the list. Judgement:
#: so each request is moved at most once on average.
SPARE_HEADS = 64


class DeadlineOrder(BatchFormer, ABC):
    """A `BatchFormer` whose batches are a run of the earliest deadlines. A subclass says which heads it gives up.

    profile: of the model on its GPU. slo: seconds within which its requests are to be answered.
    delays: a batch must end ``delays.margin`` before its first deadline, and fetching the inputs counts as a part of
        its time. So a moment of start is here the one at which the backend begins to fetch.
    """

    def __init__(self, profile: Profile, slo: float, delays: Delays):
        self._slo = slo
        self._delays = delays
        #: (latest end, id, request), ascending. Those before ``_head`` have left.
        self._queue: list[tuple[float, int, Request]] = []
        self._head = 0
        self._refused: list[Refuse] = []
        #: Of the latest candidate: its size, and the last moment at which it may start.
        self._size = 0
        self._latest = math.inf
        self.set_profile(profile)

    def set_profile(self, profile: Profile) -> None:
        self._profile = profile
        data = self._delays.data
        #: By size, the seconds of a batch with its inputs; infinite above the largest size.
        self._table = tuple(seconds + data * size for size, seconds in enumerate(profile.table))
        self._size = 0

    def set_rate(self, rate: float) -> None:
        """Does nothing: see the subclasses."""

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
                self._size = 0
                return self._queue.pop(place)[2]
        return None

    def form(self, start: float) -> Candidate | None:
        queue = self._queue
        self._size = size = self._gather(start)
        if size == 0:
            self._latest = math.inf
            return None
        deadline, _, first = queue[self._head]
        seconds = self._table[size]
        self._latest = deadline - seconds
        return Candidate(size, deadline, seconds, self._table[size + 1], first.arrival)

    @abstractmethod
    def _gather(self, start: float) -> int:
        """Give up heads, and return the size of the batch; 0 if the queue is empty now."""

    def _largest(self, start: float, size: int) -> int:
        """The largest batch that the present head allows at ``start``. One of ``size`` is known to be allowed."""
        deadline, table = self._queue[self._head][0], self._table
        most = min(len(self._queue) - self._head, len(table) - 2)
        while size < most and start <= deadline - table[size + 1]:
            size += 1
        return size

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
        if self._head > SPARE_HEADS and 2 * self._head > len(self._queue):
            self._cut()
        return taken

    def _cut(self) -> None:
        """Forget the heads that have left."""
        del self._queue[: self._head]
        self._head = 0

    def refused(self) -> list[Refuse]:
        if not self._refused:
            return []
        told, self._refused = self._refused, []
        return told

    def waiting(self) -> tuple[Request, ...]:
        return tuple(entry[2] for entry in self._queue[self._head :])

    def __len__(self) -> int:
        return len(self._queue) - self._head

    def validate(self) -> None:
        assert 0 <= self._head <= len(self._queue), (self._head, len(self._queue))
        left = self._queue[self._head :]
        assert all(one < other for one, other in itertools.pairwise(left)), "the queue is not in order"
        assert 0 <= self._size <= len(left), (self._size, len(left))
