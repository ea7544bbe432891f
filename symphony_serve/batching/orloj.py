"""Orloj's batches: the requests that score highest, in the largest batch that can be filled with feasible ones.

Algorithm 4.1 of Orloj (chapter 4 of the dissertation "Salus, Fluid, Orloj"), for one model whose requests take times
that are known as distributions only. Where to read on:

- `orloj_histograms`: distributions, and the largest of k times;
- `orloj_profiles`: the time of a batch by its size, and how measurements become a profile;
- `orloj_scores`: the score, equation 4.2;
- `orloj_queues`: which requests score highest.

A request is feasible for a size k while ``start <= deadline - E[L_k]``. The batch has one of the sizes that can be
filled with requests that are feasible for it: the largest (as algorithm 4.1 is printed), or the one whose requests have
the earliest deadline, of several the largest (as its text says). With size 1 among the sizes a batch is always there
while a request is. Without it, the smallest size runs partly filled when its earliest request could not wait longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from symphony_serve.batching import BatchFormer, Candidate
from symphony_serve.batching.orloj_histograms import Largest
from symphony_serve.batching.orloj_profiles import VaryingProfile, VaryingRequest
from symphony_serve.batching.orloj_queues import Key, Pending
from symphony_serve.delays import NO_DELAYS, Delays
from symphony_serve.errors import ServeError
from symphony_serve.messages import SAME_MOMENT_S, Reason, Refuse, Request

#: One over the expected further wait of a request that is not chosen now, per second. Source: section 4.4.4 of the
#: paper, b = 1e-4 per ms. With it the score is nearly cost * P(the batch ends in time) / E[L].
ANTICIPATED_DELAY_RATE = 0.1
#: Which of the sizes that can be filled is taken.
Choice = Literal["largest", "earliest"]


class Orloj(BatchFormer):
    """A `BatchFormer` for requests whose times vary.

    profile: the times. delays: a batch must end ``delays.margin`` before its first deadline, and fetching the inputs
    counts as a part of its time. choice: "largest" or "earliest". b: the rate of the anticipated delay, per second; see
    `orloj_scores`. pending: how the best requests are found (benchmarks have others).

    A candidate's deadline is the earliest of all requests that are feasible for its size, also if that request does not
    score high enough to be in the batch: which ones do changes with time, this deadline does not.

    Raises ServeError if ``choice`` is neither, or if ``b`` is not above 0.
    """

    def __init__(
        self,
        profile: VaryingProfile,
        delays: Delays = NO_DELAYS,
        choice: Choice = "largest",
        b: float = ANTICIPATED_DELAY_RATE,
        pending: Callable[[Mapping[int, Largest], float], Pending] = Pending,
    ) -> None:
        if choice not in ("largest", "earliest"):
            raise ServeError(f"batch choice {choice!r}: give 'largest' or 'earliest'")
        self._choice = choice
        self._delays = delays
        self._enough = profile.enough
        self._pending = pending(profile.fetched(delays.data), b)
        self._requests: dict[int, Request] = {}
        self._start = -math.inf
        self._candidate: Candidate | None = None
        #: The size of the candidate's batch, of which some places may stay empty.
        self._size = 0
        self._changes = math.inf
        self._refused: list[Refuse] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        if not math.isfinite(request.deadline):
            raise ServeError(f"request {request.id} has the deadline {request.deadline} s: give a finite time")
        cost = request.cost if isinstance(request, VaryingRequest) else 1.0
        self._pending.insert(request.deadline - self._delays.margin, request.id, cost)
        self._requests[request.id] = request

    def remove(self, request_id: int) -> Request | None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._pending.remove(request_id)
        return request

    def form(self, start: float) -> Candidate | None:
        self._start = start = max(start, self._start)
        smallest = min(time.mean for time in self._pending.times.values())
        for number in self._pending.late(start):
            request = self._requests.pop(number)
            never = request.deadline - self._delays.margin - smallest < request.arrival
            self._refused.append(Refuse(request, Reason.LATE_ON_ARRIVAL if never else Reason.LATE))
        self._candidate, self._changes = self._chosen(start)
        return self._candidate

    def _chosen(self, start: float) -> tuple[Candidate | None, float]:
        """The candidate, and the last moment at which neither it changes nor a request is given up."""
        times = self._pending.times
        smallest, first = next(iter(times.items()))
        head = self._pending.earliest(smallest, start)
        if head is None:
            return None, math.inf
        given_up = head[0] - first.mean
        size = self._filled(start)
        if size is None:
            last = given_up - SAME_MOMENT_S
            if start < last:
                return None, math.nextafter(last, -math.inf)
            size = smallest
        candidate = self._of_size(size, start)
        return candidate, min(given_up, candidate.deadline - candidate.seconds)

    def _filled(self, start: float) -> int | None:
        """The size of the batch, of those that can be filled."""
        pending = self._pending
        sizes = (size for size in reversed(pending.times) if pending.count(size, start) >= size)
        if self._choice == "largest":
            return next(sizes, None)
        return min(sizes, key=lambda size: self._head(size, start), default=None)

    def _head(self, size: int, start: float) -> Key:
        head = self._pending.earliest(size, start)
        assert head is not None, size
        return head

    def _of_size(self, size: int, start: float) -> Candidate:
        pending = self._pending
        deadline, _ = self._head(size, start)
        following = min((time.mean for other, time in pending.times.items() if other > size), default=math.inf)
        self._size = size
        filled = min(size, pending.count(size, start))
        time = pending.times[size]
        longest = time.histogram.edges[-1] if self._enough else math.inf
        return Candidate(filled, deadline, time.mean, following, longest)

    def changes_at(self) -> float:
        return self._changes

    def take(self) -> tuple[Request, ...]:
        if self._candidate is None:
            return ()
        numbers = self._pending.take(self._size, self._start)
        self._candidate = None
        taken = [self._requests.pop(number) for number in numbers]
        return tuple(sorted(taken, key=_order))

    def refused(self) -> Sequence[Refuse]:
        refused, self._refused = self._refused, []
        return refused

    def waiting(self) -> Sequence[Request]:
        return sorted(self._requests.values(), key=_order)

    def set_rate(self, rate: float) -> None:
        """Does nothing: no decision depends on the rate."""

    def set_profile(self, profile: VaryingProfile) -> None:
        self._pending.replace(profile.fetched(self._delays.data))
        self._enough = profile.enough
        self._candidate = None

    def validate(self) -> None:
        assert len(self._pending) == len(self._requests)
        assert all(number in self._pending for number in self._requests)
        keys = [key for keys in self._pending.by_cost.values() for key in keys]
        margin = self._delays.margin
        assert sorted(keys) == [(request.deadline - margin, request.id) for request in self.waiting()]
        assert all(keys == sorted(keys) and keys for keys in self._pending.by_cost.values())


def _order(request: Request) -> tuple[float, int]:
    return request.deadline, request.id
