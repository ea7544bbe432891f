"""Clockwork (OSDI 2020), as its paper and its public scheduler INFER4 choose batches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from benchmarks.rival_servers.central import CentralServer, Choice, fitting
from symphony_serve.messages import Event, Instruction, RequestArrived
from symphony_serve.model_side import Model

#: Source: Clockwork's docs/controller.md: the SLO is shortened by 5 ms, and batches have at most 16 requests.
SHORTENED_S = 0.005
MAX_BATCH = 16


class Clockwork(CentralServer):
    """Every request and batch size is a strategy whose key is the last moment to start it, ``d - l(b)``.

    A free GPU takes the strategy with the smallest key that is still to come and that the queue can fill: the request
    and those behind it.
    """

    def __init__(self, models: Iterable[Model]):
        super().__init__(models)
        #: By model, its best strategy: (key, first, size). It holds until the queue changes or the key has passed.
        self._best: dict[str, tuple[float, int, int]] = {}

    def handle(self, event: Event, now: float) -> list[Instruction]:
        if isinstance(event, RequestArrived):
            event = RequestArrived(replace(event.request, deadline=event.request.deadline - SHORTENED_S))
        return super().handle(event, now)

    def _changed(self, model: str) -> None:
        self._best.pop(model, None)

    def _choose(self, now: float) -> Choice | None:
        found, smallest = None, math.inf
        for name, queue in self._queues.items():
            if not queue:
                continue
            best = self._best.get(name)
            if best is None or best[0] < now:
                best = self._best[name] = self._strategy(name, now)
            if best[0] < smallest:
                smallest, found = best[0], Choice(name, best[1], best[2])
        return found

    def _strategy(self, name: str, now: float) -> tuple[float, int, int]:
        queue, table = self._queues[name], self._models[name].profile.table
        most, best = min(MAX_BATCH, len(table) - 2), (math.inf, 0, 0)
        for first, (deadline, _, _) in enumerate(queue):
            size = fitting(table, deadline, now, min(most, len(queue) - first))
            if size:
                best = min(best, (deadline - table[size], first, size))
        return best
