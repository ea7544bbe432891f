"""A scheduler, GPUs that take as long as was predicted, and a clock: for tests. It validates after each event."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable

from symphony_serve.messages import (
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

#: In the order of one moment: events, then the tick.
EVENT, TICK = 0, 1


class Driver:
    """Brings events to a scheduler in the order of time, and records what it does.

    batches: (start, GPU, ids of the requests) of all that were sent. refused: by id, the reason's name.
    answers: whether the GPUs answer; if not, the test sends `BatchDone` itself.
    """

    def __init__(self, scheduler: Scheduler, answers: bool = True):
        self.scheduler = scheduler
        self.batches: list[tuple[float, int, list[int]]] = []
        self.dispatches: list[Dispatch] = []
        self.refused: dict[int, str] = {}
        self.others: list[Instruction] = []
        self.wake = math.inf
        self.now = 0.0
        self._answers = answers
        self._count = itertools.count()
        self._coming: list[tuple[float, int, int, Event]] = []

    def at(self, moment: float, event: Event, order: int = EVENT) -> None:
        """The event will happen at this moment."""
        heapq.heappush(self._coming, (moment, order, next(self._count), event))

    def joins(self, *frees: float) -> None:
        """GPUs 1, 2, 3 and so on join at 0, and are free at these moments."""
        for gpu, free in enumerate(frees, start=1):
            self.at(0.0, GpuJoined(gpu, 1, free))

    def requests(self, requests: Iterable[Request]) -> None:
        """They come at their arrival."""
        for request in requests:
            self.at(request.arrival, RequestArrived(request))

    def run(self, until: float = math.inf) -> Driver:
        """Let everything happen up to and at ``until``."""
        while self._coming and self._coming[0][0] <= until:
            self.now, order, _, event = heapq.heappop(self._coming)
            if order == TICK and self.now != self.wake:
                continue
            for instruction in self.scheduler.handle(event, self.now):
                self._carry_out(instruction)
            self.scheduler.validate()
        return self

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, WakeAt):
            self.wake = instruction.at
            self.at(self.wake, Tick(), TICK)
        elif isinstance(instruction, Dispatch):
            self.dispatches.append(instruction)
            self.batches.append((instruction.start, instruction.gpu, [one.id for one in instruction.requests]))
            if self._answers:
                end = instruction.start + instruction.seconds
                self.at(end, BatchDone(instruction.gpu, instruction.token, instruction.plan))
        elif isinstance(instruction, Refuse):
            assert instruction.request.id not in self.refused
            self.refused[instruction.request.id] = instruction.reason.name
        else:
            self.others.append(instruction)
