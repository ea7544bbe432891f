"""What the baselines with one central queue for each model have in common. A subclass chooses the batch for a GPU."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from symphony_serve.messages import (
    BatchDone,
    Dispatch,
    Event,
    GpuJoined,
    Instruction,
    Reason,
    Refuse,
    Request,
    RequestArrived,
    Tick,
    WakeAt,
)
from symphony_serve.model_side import Model


class Choice(NamedTuple):
    """The requests from ``first`` to ``first + size - 1`` of a model's queue."""

    model: str
    first: int
    size: int


class CentralServer:
    """Models with a queue each, ordered by deadline, and GPUs that any of them can use. Nothing waits for company."""

    #: Whether requests that cannot be answered in time are refused.
    refuses = True

    def __init__(self, models: Iterable[Model]):
        self._models = {model.name: model for model in models}
        self._queues: dict[str, list[tuple[float, int, Request]]] = {name: [] for name in self._models}
        self._idle: list[int] = []
        #: By GPU, the batches sent so far, and the one that runs.
        self._plans: dict[int, int] = {}
        self._running: dict[int, Dispatch] = {}

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in what happened at ``now``."""
        if isinstance(event, RequestArrived):
            self._enqueue(event.request)
            return [WakeAt(now)] if self._idle or self._may_preempt(event.request, now) else []
        if isinstance(event, GpuJoined):
            self._plans[event.gpu] = 0
            heapq.heappush(self._idle, event.gpu)
            return [WakeAt(now)]
        if isinstance(event, BatchDone):
            if event.gpu in self._running and self._running[event.gpu].plan == event.plan:
                self._done(self._running.pop(event.gpu))
                heapq.heappush(self._idle, event.gpu)
            return [WakeAt(now)]
        assert isinstance(event, Tick), event
        out: list[Instruction] = []
        self._preempt(now, out)
        while self._idle:
            self._refuse_late(now, out)
            choice = self._choose(now)
            if choice is None:
                break
            out.append(self._send(choice, now))
        return out

    def _enqueue(self, request: Request) -> None:
        bisect.insort(self._queues[request.model], (request.deadline, request.id, request))
        self._changed(request.model)

    def _send(self, choice: Choice, now: float) -> Dispatch:
        queue, gpu = self._queues[choice.model], heapq.heappop(self._idle)
        chosen = slice(choice.first, choice.first + choice.size)
        requests = tuple([request for _, _, request in queue[chosen]])
        del queue[chosen]
        self._changed(choice.model)
        seconds = self._models[choice.model].profile.seconds(choice.size)
        dispatch = Dispatch(gpu, 1, self._plans[gpu], choice.model, requests, now, seconds)
        self._plans[gpu] += 1
        self._running[gpu] = dispatch
        return dispatch

    def _refuse_late(self, now: float, out: list[Instruction]) -> None:
        if not self.refuses:
            return
        for name, queue in self._queues.items():
            one, late = self._models[name].profile.seconds(1), 0
            while late < len(queue) and now > queue[late][0] - one:
                out.append(Refuse(queue[late][2], Reason.LATE))
                late += 1
            if late:
                del queue[:late]
                self._changed(name)

    def _choose(self, now: float) -> Choice | None:
        """The batch for an idle GPU; None if there is none. No request is too late for a batch of 1."""
        raise NotImplementedError

    def _changed(self, model: str) -> None:
        """The model's queue has changed."""

    def _done(self, dispatch: Dispatch) -> None:
        """The batch has ended."""

    def _may_preempt(self, request: Request, now: float) -> bool:
        """Whether the request, which has just come, could stop a batch that runs."""
        return False

    def _preempt(self, now: float, out: list[Instruction]) -> None:
        """Stop batches."""


def fitting(profile_table: Sequence[float], deadline: float, now: float, most: int) -> int:
    """The largest size of at most ``most`` whose batch ends by the deadline if it starts now; ``most`` was measured."""
    size = bisect.bisect_right(profile_table, deadline - now, 0, most + 1) - 1
    while size > 0 and now > deadline - profile_table[size]:
        size -= 1
    return size
