"""Shepherd's Flex (NSDI 2023)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.rival_servers.central import CentralServer, Choice, fitting
from benchmarks.serve_twin import MeasuredSimulation
from symphony_serve.messages import Dispatch, Instruction, Request
from symphony_serve.model_side import Model

#: A batch stops one that runs if it has this many times as many requests. Source: Shepherd's public code for its
#: comparison with Symphony (nexuslb, tools/shepherd); its paper derives 3.03 as the best lambda.
PREEMPTS = 3.03


@dataclass(frozen=True, slots=True)
class Preempt(Instruction):
    """Stop a batch that runs; nothing of it is answered."""

    gpu: int
    plan: int


class PreemptiveSimulation(MeasuredSimulation):
    """A simulation in which a server may stop a batch."""

    def __init__(self, *args: Any, **kwargs: Any):
        #: (GPU, plan) of batches that were stopped.
        self._stopped: set[tuple[int, int]] = set()
        super().__init__(*args, **kwargs)

    def _carry_out(self, instruction: Instruction, now: float) -> None:
        if not isinstance(instruction, Preempt):
            super()._carry_out(instruction, now)
            return
        place = (instruction.gpu, instruction.plan)
        self._stopped.add(place)
        start = next(one.start for _, _, one in self._running if (one.gpu, one.plan) == place)
        self._keep_busy(instruction.gpu, start, now)

    def _end_batch(self, end: float, number: int, batch: Dispatch) -> None:
        if (batch.gpu, batch.plan) in self._stopped:
            self._stopped.remove((batch.gpu, batch.plan))
        else:
            super()._end_batch(end, number, batch)


class Shepherd(CentralServer):
    """A free GPU takes the largest batch of all models. A batch that is much larger stops one that runs.

    heads: a model's batch begins with its earliest deadline, as large as that allows. Otherwise it is the largest batch
    that can be made, and what is before it waits for another GPU. The first is better (docs/serving-figures.md).
    """

    def __init__(self, models: Iterable[Model], heads: bool = True):
        super().__init__(models)
        self._heads = heads
        #: The model whose request came last.
        self._newest = ""

    def _choose(self, now: float) -> Choice | None:
        largest: Choice | None = None
        for name in self._queues:
            choice = self._largest(name, now)
            if choice.size and (largest is None or choice.size > largest.size):
                largest = choice
        return largest

    def _largest(self, name: str, now: float) -> Choice:
        """The batch of the model; of size 0 if none can end in time."""
        queue, table = self._queues[name], self._models[name].profile.table
        if self._heads:
            one, first = table[1], 0
            while first < len(queue) and now > queue[first][0] - one:
                first += 1
            most = min(len(queue) - first, len(table) - 2)
            return Choice(name, first, fitting(table, queue[first][0], now, most) if most else 0)
        low = max(0, len(queue) - (len(table) - 2))
        high = len(queue)
        while low < high:
            middle = (low + high) // 2
            if now <= queue[middle][0] - table[len(queue) - middle]:
                high = middle
            else:
                low = middle + 1
        return Choice(name, low, len(queue) - low)

    def _may_preempt(self, request: Request, now: float) -> bool:
        self._newest = request.model
        return bool(self._victim(now))

    def _victim(self, now: float) -> list[int]:
        """The GPU whose batch the newest request's model may stop, if there is one."""
        if self._idle or not self._running or not self._newest:
            return []
        smallest = min(self._running.values(), key=lambda one: (len(one.requests), one.gpu))
        size = self._largest(self._newest, now).size
        return [smallest.gpu] if size >= PREEMPTS * len(smallest.requests) else []

    def _preempt(self, now: float, out: list[Instruction]) -> None:
        for gpu in self._victim(now):
            stopped = self._running.pop(gpu)
            out.append(Preempt(gpu, stopped.plan))
            for request in stopped.requests:
                self._enqueue(request)
            self._idle.append(gpu)
            self._refuse_late(now, out)
            out.append(self._send(self._largest(self._newest, now), now))
        self._newest = ""
