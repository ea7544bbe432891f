"""A scheduler, GPUs that take as long as was predicted, and a clock: for tests. It validates after each event.

It also checks when requests are refused: at the deadline at the latest. Only what a lost GPU gives back may be refused
later, at the moment of the loss.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable

from symphony_serve.messages import (
    BatchDone,
    Dispatch,
    Event,
    GpuJoined,
    GpuLost,
    Instruction,
    Reason,
    Refuse,
    Request,
    RequestArrived,
    Suspect,
    Tick,
    WakeAt,
)
from symphony_serve.scheduler import Scheduler
from tests.serve.invariants import check_scheduler

#: Seconds until a test gives up.
PATIENCE_S = 120.0
#: What a lost GPU gives back may be refused at the moment of the loss.
LOST = (Reason.GPU_LOST, Reason.LOST_TWICE)
#: In the order of one moment: events, then the tick.
EVENT, TICK = 0, 1


def until(reached: Callable[[], object]) -> object:
    """Wait until it is so. Returns what was returned."""
    end = time.monotonic() + PATIENCE_S
    while not (found := reached()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


async def reached(holds: Callable[[], object]) -> None:
    """As `until`, on an event loop whose other tasks go on meanwhile."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


def staggered(model: str, count: int, gap: float, slo: float) -> list[Request]:
    """``count`` requests of one model at 0, ``gap``, 2*``gap`` and so on; ids from 1 (figure 4)."""
    return [Request(number, model, gap * (number - 1), gap * (number - 1) + slo) for number in range(1, count + 1)]


class Driver:
    """Brings events to a scheduler in the order of time, and records what it does.

    batches: (start, GPU, ids of the requests) of all that were sent. refused: by id, the reason's name; refused_at: the
    moment.
    answers: whether the GPUs answer; if not, the test sends `BatchDone` itself.
    """

    def __init__(self, scheduler: Scheduler, answers: bool = True):
        self.scheduler = scheduler
        self.batches: list[tuple[float, int, list[int]]] = []
        self.dispatches: list[Dispatch] = []
        self.refused: dict[int, str] = {}
        self.refused_at: dict[int, float] = {}
        self.others: list[Instruction] = []
        self.wake = math.inf
        self.now = 0.0
        self._answers = answers
        self._count = itertools.count()
        self._coming: list[tuple[float, int, int, Event | Callable[[], object]]] = []

    def at(self, moment: float, event: Event | Callable[[], object], order: int = EVENT) -> None:
        """The event will happen at this moment, or what is to be called is called."""
        heapq.heappush(self._coming, (max(moment, self.now), order, next(self._count), event))

    def joins(self, *moments: float) -> None:
        """GPUs 1, 2, 3 and so on join at these moments."""
        for gpu, moment in enumerate(moments, start=1):
            self.at(moment, GpuJoined(gpu, 1))

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
            event() if callable(event) else self.tell(event)
        return self

    def tell(self, event: Event) -> None:
        """Let the scheduler handle the event now, and carry out what it answers."""
        told = self.scheduler.handle(event, self.now)
        check_scheduler(self.scheduler, self.now)
        for instruction in told:
            self._carry_out(instruction)
        self.handled()

    def handled(self) -> None:
        """Is called after each event; for checks of a test."""

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
            request, reason = instruction.request, instruction.reason
            assert request.id not in self.refused
            in_time = self.now <= max(request.deadline, request.arrival) or reason in LOST
            assert in_time, f"request {request.id} is refused at {self.now}: too late"
            self.refused[request.id] = reason.name
            self.refused_at[request.id] = self.now
        else:
            self.others.append(instruction)
            if isinstance(instruction, Suspect):
                self.at(self.now, GpuLost(instruction.gpu))
