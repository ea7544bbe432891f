"""Batches that take other times than was predicted, on the twin. All times are seconds."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from symphony_serve.messages import Dispatch, GpuJoined, Instruction, Request, Server, Suspect
from symphony_serve.twin import Simulation


class VaryingSimulation(Simulation):
    """A `Simulation` in which a batch takes as long as ``takes`` says, with what passes before its inputs are there.

    If the server gives a batch up because it takes too long, nothing of it is answered, and the GPU joins again when it
    ends.
    """

    def __init__(
        self,
        server: Server,
        gpus: int,
        requests: Iterator[Request],
        warm_up: float,
        measured: float,
        takes: Callable[[Dispatch], float],
    ):
        self._takes = takes
        #: (GPU, token) of GPUs whose batch was given up and still runs.
        self._suspects: set[tuple[int, int]] = set()
        super().__init__(server, gpus, requests, warm_up, measured)

    def _seconds(self, batch: Dispatch) -> float:
        return self._takes(batch)

    def _carry_out(self, instruction: Instruction, now: float) -> None:
        if not isinstance(instruction, Suspect):
            super()._carry_out(instruction, now)
            return
        # The batch that the GPU runs goes on. What was sent behind it does not run.
        gpu = instruction.gpu
        self._suspects.add((gpu, instruction.token))
        behind = sorted(one.plan for _, _, one in self._running if one.gpu == gpu)[1:]
        self._running = [one for one in self._running if one[2].gpu != gpu or one[2].plan not in behind]
        heapq.heapify(self._running)

    def _end_batch(self, end: float, number: int, batch: Dispatch) -> None:
        if (batch.gpu, batch.token) not in self._suspects:
            super()._end_batch(end, number, batch)
            return
        self._suspects.remove((batch.gpu, batch.token))
        self._keep_busy(batch.gpu, batch.start, end)
        self._tell(GpuJoined(batch.gpu, batch.token + 1), end)
