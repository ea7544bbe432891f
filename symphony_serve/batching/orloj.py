"""Orloj's batches: the requests that score highest, in the largest batch that can be filled with feasible ones.

Algorithm 4.1 of Orloj (chapter 4 of the dissertation "Salus, Fluid, Orloj"), for one model whose requests take times
that are known as distributions only. Where to read on:

- `orloj_histograms`: distributions of times;
- `orloj_learned`: how the batches that were seen become profiles, the time of a batch by its size;
- `orloj_scores`: the score, equation 4.2;
- `orloj_queues`: which requests score highest.

A request is feasible for a size k while ``start <= deadline - E[L_k]``. The batch has the largest of the sizes that can
be filled with requests that are feasible for it, as algorithm 4.1 is printed. (By its text, it is the size whose
requests have the earliest deadline. `benchmarks.orloj` has both.) Size 1 is one of the sizes, so a batch is always
there while a request is.

The paper has one distribution for all requests. Where requests name their sources, one long request among short ones
makes them all wait. So there may be several *classes*, each with a profile: the first has the sources with the shortest
times, each other one has those of the class before it and longer ones, and the last has all. Each class has a batch
that it could run. The one with the most requests a second is run, of equal ones that with the shorter sources. But
first goes a batch that would be too late after it, if it loses nothing by that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from symphony_serve.batching import BatchFormer, Candidate
from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.batching.orloj_learned import SeenProfile
from symphony_serve.batching.orloj_queues import Pending
from symphony_serve.delays import NO_DELAYS, Delays
from symphony_serve.errors import ServeError
from symphony_serve.messages import Reason, Refuse, Request

#: One over the expected further wait of a request that is not chosen now, per second. Source: section 4.4.4 of the
#: paper, b = 1e-4 per ms. With it the score is nearly cost * P(the batch ends in time) / E[L].
ANTICIPATED_DELAY_RATE = 0.1


class _Class(NamedTuple):
    """Requests that may be in one batch: those of these sources, or all (None)."""

    sources: frozenset[str] | None
    pending: Pending


class _Batch(NamedTuple):
    """The candidate, and the class that it comes from."""

    candidate: Candidate
    pending: Pending


class Orloj(BatchFormer):
    """A `BatchFormer` for requests whose times vary.

    profiles: the times of each class, the shortest first. Requests of a source that none but the last one names are in
    the last one only. delays: a batch must end ``delays.margin`` before its first deadline.

    A candidate's deadline is the earliest of all requests that are feasible for its size, also if that request does not
    score high enough to be in the batch: which ones do changes with time, this deadline does not.
    """

    def __init__(self, profiles: Sequence[SeenProfile], delays: Delays = NO_DELAYS) -> None:
        self._delays = delays
        self._requests: dict[int, Request] = {}
        self._start = -math.inf
        self._changes = math.inf
        self._refused: list[Refuse] = []
        self.set_profile(profiles)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        if not math.isfinite(request.deadline):
            raise ServeError(f"request {request.id} has the deadline {request.deadline} s: give a finite time")
        self._insert(request)
        self._requests[request.id] = request

    def _insert(self, request: Request) -> None:
        for one in self._classes:
            if one.sources is None or request.source in one.sources:
                one.pending.insert(request.deadline - self._delays.margin, request.id)

    def remove(self, request_id: int) -> Request | None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._drop(request_id)
        return request

    def _drop(self, number: int) -> None:
        for one in self._classes:
            if number in one.pending:
                one.pending.remove(number)

    def form(self, start: float) -> Candidate | None:
        self._start = start = max(start, self._start)
        smallest = min(time.mean for time in self._classes[0].pending.times.values())
        late = [number for one in self._classes for number in one.pending.late(start)]
        for number in late:
            if number in self._requests and not any(number in one.pending for one in self._classes):
                request = self._requests.pop(number)
                never = request.deadline - self._delays.margin - smallest < request.arrival
                self._refused.append(Refuse(request, Reason.LATE_ON_ARRIVAL if never else Reason.LATE))
        self._batch, self._changes = None, math.inf
        found = [batch for one in self._classes if (batch := self._of_class(one.pending, start)) is not None]
        if found:
            self._batch = self._first(found, start)
        return self._batch.candidate if self._batch is not None else None

    def _first(self, found: list[_Batch], start: float) -> _Batch:
        fastest = max(found, key=lambda batch: batch.candidate.size / batch.candidate.seconds)
        for batch in found:
            seconds, longest = fastest.candidate.seconds, batch.pending.times[batch.candidate.size].edges[-1]
            until, can_wait = batch.candidate.deadline - longest - seconds, _latest(fastest) - batch.candidate.seconds
            if batch is fastest or start > can_wait:
                continue
            if start > until:
                self._changes = min(self._changes, can_wait)
                return batch
            self._changes = min(self._changes, until)
        return fastest

    def _of_class(self, pending: Pending, start: float) -> _Batch | None:
        """The batch that the class could run. It notes the last moment at which neither it changes nor one is late."""
        smallest, first = next(iter(pending.times.items()))
        head = pending.earliest(smallest, start)
        if head is None:
            return None
        candidate = self._of_size(pending, self._filled(pending, start), start)
        self._changes = min(self._changes, head[0] - first.mean, candidate.deadline - candidate.seconds)
        return _Batch(candidate, pending)

    def _filled(self, pending: Pending, start: float) -> int:
        """The size of the batch, the largest of those that can be filled."""
        most = len(pending)
        sizes = reversed(pending.times)
        return next(size for size in sizes if size <= most and pending.count(size, start) >= size)

    def _of_size(self, pending: Pending, size: int, start: float) -> Candidate:
        head = pending.earliest(size, start)
        assert head is not None, size
        following = min((time.mean for other, time in pending.times.items() if other > size), default=math.inf)
        time = pending.times[size]
        longest = time.edges[-1] if self._enough else math.inf
        return Candidate(size, head[0], time.mean, following, longest)

    def changes_at(self) -> float:
        return self._changes

    def take(self) -> tuple[Request, ...]:
        if self._batch is None:
            return ()
        numbers = self._batch.pending.best(self._batch.candidate.size, self._start)
        self._batch = None
        for number in numbers:
            self._drop(number)
        taken = [self._requests.pop(number) for number in numbers]
        return tuple(sorted(taken, key=_order))

    def refused(self) -> Sequence[Refuse]:
        refused, self._refused = self._refused, []
        return refused

    def waiting(self) -> Sequence[Request]:
        return sorted(self._requests.values(), key=_order)

    def set_rate(self, rate: float) -> None:
        """Does nothing: no decision depends on the rate."""

    def set_profile(self, profiles: Sequence[SeenProfile]) -> None:
        self._enough = profiles[-1].enough
        self._classes = [
            _Class(None if profile is profiles[-1] else profile.sources, self._queue(profile.times))
            for profile in profiles
        ]
        for request in self._requests.values():
            self._insert(request)
        self._batch = None

    def _queue(self, times: Mapping[int, Histogram]) -> Pending:
        """The queue of a class whose batches take these times by their size. (Benchmarks have others.)"""
        return Pending(times, ANTICIPATED_DELAY_RATE)


def _latest(batch: _Batch) -> float:
    return batch.candidate.deadline - batch.candidate.seconds


def _order(request: Request) -> tuple[float, int]:
    return request.deadline, request.id
