"""The rule of `serve.batch` of Ray Serve: a batch is closed when it is full, or a time after its first request came."""

from __future__ import annotations

import math
from collections.abc import Iterable

from benchmarks.rival_servers.central import CentralServer, Choice
from symphony_serve.errors import ServeError
from symphony_serve.messages import (
    SAME_MOMENT_S,
    BatchTook,
    Event,
    Instruction,
    Reason,
    Refuse,
    RequestArrived,
    StoodStill,
    Tick,
    WakeAt,
)
from symphony_serve.model_side import Model


class ServeBatch(CentralServer):
    """First come first served; no deadline is known.

    size: `max_batch_size`. wait: `batch_wait_timeout_s`, seconds. most: how many requests of a model may wait
    (`max_queued_requests`); one that comes when so many wait is refused; None: no limit. Ray Serve closes the next
    batch while the last one still runs, and counts the time from then. Here a batch is closed when its GPU is free, and
    the time is that since the arrival. Both are to its advantage.
    """

    refuses = False

    def __init__(self, models: Iterable[Model], size: int, wait: float, most: int | None = None):
        super().__init__(models)
        if size < 1 or not 0 <= wait < math.inf or (most is not None and most < 1):
            raise ServeError(f"size {size}, wait {wait} s, at most {most} waiting: give at least 1, 0 s and 1")
        self._size, self._wait, self._most = size, wait, most

    def handle(self, event: Event, now: float) -> list[Instruction]:
        if isinstance(event, RequestArrived) and len(self._queues[event.request.model]) == self._most:
            return [Refuse(event.request, Reason.MAKES_WAY)]
        if isinstance(event, BatchTook | StoodStill):
            return []  # No decision depends on how long a batch takes.
        out = super().handle(event, now)
        if isinstance(event, Tick) and self._idle:
            due = min((queue[0][2].arrival + self._wait for queue in self._queues.values() if queue), default=math.inf)
            if due < math.inf:
                out.append(WakeAt(max(due, now)))
        return out

    def _choose(self, now: float) -> Choice | None:
        due = []
        for name, queue in self._queues.items():
            most = min(self._size, self._models[name].profile.max_batch)
            if queue and (len(queue) >= most or now >= queue[0][2].arrival + self._wait - SAME_MOMENT_S):
                due.append((queue[0][2].arrival, name, min(len(queue), most)))
        if not due:
            return None
        _, name, size = min(due)
        return Choice(name, 0, size)
