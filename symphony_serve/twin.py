"""A server and its GPUs on a virtual clock: how many requests are in time.

A server is the `Scheduler`; benchmarks have others. A GPU takes exactly as long for a batch as its `Dispatch` says. Of
one moment, the arrivals come first, then the ends of batches, and then the tick that the server has asked for. All
times are seconds, all rates requests per second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from symphony_serve.errors import ServeError
from symphony_serve.messages import (
    SAME_MOMENT_S,
    BatchDone,
    Dispatch,
    Event,
    GpuJoined,
    Instruction,
    Refuse,
    Request,
    RequestArrived,
    Tick,
    WakeAt,
)
from symphony_serve.scheduler import Scheduler


@dataclass(slots=True)
class ModelCount:
    """What became of the requests of one model. good: answered in time; late: answered late; refused."""

    good: int = 0
    late: int = 0
    refused: int = 0

    @property
    def total(self) -> int:
        return self.good + self.late + self.refused

    @property
    def bad_rate(self) -> float:
        """The part of the requests that were refused or answered late; 0 if there were none."""
        return 1 - self.good / self.total if self.total else 0.0


class Simulation:
    """A server and ``gpus`` GPUs, numbered from 0, which join at 0. Of ``server``, only `handle` is called.

    requests: in the order of arrival. warm_up, measured: seconds; requests that come before or after them are served
    but not counted.
    """

    def __init__(self, server: Scheduler, gpus: int, requests: Iterator[Request], warm_up: float, measured: float):
        self._server = server
        self._requests = requests
        self._begin, self._end = warm_up, warm_up + measured
        #: By model, what became of the requests that were counted.
        self.models: dict[str, ModelCount] = {}
        #: (end, number, dispatch) of batches that were sent.
        self._running: list[tuple[float, int, Dispatch]] = []
        self._number = 0
        #: Requests that have come and are neither answered nor refused.
        self._open = 0
        self._wake = math.inf
        for gpu in range(gpus):
            self._tell(GpuJoined(gpu, 1), 0.0)

    @property
    def worst_bad_rate(self) -> float:
        """The bad rate of the model for which it is highest."""
        return max((count.bad_rate for count in self.models.values()), default=0.0)

    def play(self) -> None:
        """Let all requests of the measured time come, and all of them be answered or refused."""
        request = next(self._requests, None)
        while request is not None or self._open:
            due = self._running[0][0] if self._running else math.inf
            if request is not None and request.arrival > self._end:
                request = None
            elif request is not None and request.arrival <= min(due, self._wake):
                self._open += 1
                self._tell(RequestArrived(request), request.arrival)
                request = next(self._requests, None)
            elif min(due, self._wake) == math.inf:
                raise ServeError(f"{self._open} requests are neither answered nor refused, and nothing is to happen")
            elif due <= self._wake:
                self._end_batch(*heapq.heappop(self._running))
            else:
                now, self._wake = self._wake, math.inf
                self._tell(Tick(), now)

    def _tell(self, event: Event, now: float) -> None:
        for instruction in self._server.handle(event, now):
            if isinstance(instruction, WakeAt):
                self._wake = instruction.at
            elif isinstance(instruction, Dispatch):
                self._number += 1
                heapq.heappush(self._running, (self._end_of(instruction), self._number, instruction))
            elif isinstance(instruction, Refuse):
                self._open -= 1
                self._count(instruction.request, "refused")
            else:
                self._carry_out(instruction, now)

    def _end_of(self, batch: Dispatch) -> float:
        return batch.start + batch.seconds

    def _carry_out(self, instruction: Instruction, now: float) -> None:
        """An instruction that is not given where batches take the predicted times."""
        raise ServeError(f"{instruction!r} is no instruction of a scheduler")

    def _end_batch(self, end: float, number: int, batch: Dispatch) -> None:
        self._open -= len(batch.requests)
        for request in batch.requests:
            self._count(request, "good" if end <= request.deadline + SAME_MOMENT_S else "late")
        self._tell(BatchDone(batch.gpu, batch.token, batch.plan), end)

    def _count(self, request: Request, what: str) -> None:
        if self._begin <= request.arrival <= self._end:
            count = self.models.setdefault(request.model, ModelCount())
            setattr(count, what, getattr(count, what) + 1)
