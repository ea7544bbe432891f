"""A server, a model, and what stands for a device, whose batches end, fail or are lost when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.rival_servers.fifo import Fifo
from symphony_serve.delays import Delays
from symphony_serve.errors import DeviceLost, Refused
from symphony_serve.model_side import EAGER, Model, StartPolicy
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.shell.async_server import AsyncServer, BatchSeen
from symphony_serve.shell.device import Device, Waited
from tests.serve.driving import PATIENCE_S, reached


class HeldDevice:
    """Doubles the inputs of a batch, which stays in it until it is let go. With a poisonous input it dies.

    runs: the inputs of each batch. passed: by first input, what a batch calls that leaves the first stage. fault: is
    raised by the next batch or look. look: is waited for by each look. asked: whether it was asked if it is back. most:
    batches that were in it at once.
    """

    def __init__(self, *models: str, opened: bool = False, poison: object = None):
        self.models = frozenset(models or "m")
        self.runs: list[list[Any]] = []
        #: By first input, what is in it.
        self.there: dict[Any, asyncio.Future[Sequence[Any] | None]] = {}
        self.passed: dict[Any, Callable[[], None] | None] = {}
        self.fault: Exception | None = None
        self.alive, self.asked, self.looked, self.most = True, False, 0, 0
        self.back, self.look = asyncio.Event(), asyncio.Event()
        self.look.set()
        self._opened, self._poison = opened, poison

    async def run(self, model: str, inputs: list[Any], passed: Callable[[], None] | None = None) -> Waited:
        self.runs.append(list(inputs))
        self.passed[inputs[0]] = passed
        outputs = None
        if not self._opened:
            gone = self.there[inputs[0]] = asyncio.get_running_loop().create_future()
            self.most = max(self.most, len(self.there))
            try:
                outputs = await gone
            finally:
                if self.there.get(inputs[0]) is gone:
                    del self.there[inputs[0]]
        self.alive = self.alive and self._poison not in inputs
        self._lives()
        return Waited([2 * value for value in inputs] if outputs is None else outputs, 0.0)

    async def check(self) -> None:
        self.looked += 1
        await self.look.wait()
        self._lives()

    def _lives(self) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        if not self.alive:
            raise DeviceLost("killed", self._is_back)

    async def _is_back(self) -> bool:
        self.asked = True
        await asyncio.sleep(0.001)
        self.alive = self.back.is_set()
        return self.alive

    def open(self) -> None:
        """What is in it, and what comes, ends."""
        self._opened = True
        self._end_all()

    def lose(self) -> None:
        """It dies with all that is in it."""
        self.alive = False
        self._end_all()

    def _end_all(self) -> None:
        for gone in self.there.values():
            gone.set_result(None)
        self.there.clear()

    async def has(self, *values: object) -> None:
        """Wait until batches with these first inputs are in it, and no other."""
        await reached(lambda: self.there.keys() == set(values))

    async def ends(self, value: object, output: object) -> None:
        """Wait until the batch of this input is in it, and let it go."""
        await reached(lambda: value in self.there)
        self.there[value].set_result([output])


class Patient(AsyncServer):
    """A server that waits for a batch for so many seconds. seen: the batches that have run. scheduler: its own."""

    def __init__(self, models: Sequence[Model], devices: Sequence[Device], patience: float = PATIENCE_S):
        self.patience, self.seen = patience, list[BatchSeen]()
        super().__init__(models, devices, self.seen.append)

    def _decides(self, models: Sequence[Model]) -> Scheduler:
        self.scheduler = Scheduler(models, least_patience=self.patience)
        return self.scheduler


def quick(
    name: str = "m", slo: float = 60.0, max_batch: int = 4, policy: StartPolicy = EAGER, jitter: float | None = None
) -> Model:
    """A model whose batches take 1 ms by its profile. jitter: half of the SLO unless given."""
    profile = Profile.linear(0.0, 1e-3, max_batch)
    return Model(name, profile, slo, Fifo, policy, Delays(jitter=slo / 2 if jitter is None else jitter))


async def became(*answers: asyncio.Future[Any]) -> list[Any]:
    """Of each answer its output, or the name of why it was refused, or what its error says."""
    found = await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), PATIENCE_S)
    return [_said(one) for one in found]


def _said(one: Any) -> Any:
    if isinstance(one, Refused):
        return one.reason.name
    return "cancelled" if isinstance(one, asyncio.CancelledError) else str(one) if isinstance(one, Exception) else one
