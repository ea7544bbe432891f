"""One device: a process for each model that it is to have, of which one at a time runs a batch.

A version of a model is a model here, and so is one of several models. docs/serving-decisions.md says why each is a
process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.model_process import Loading
from fluidtune.serving.process import LOOK_S, Process
from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.shell.device import Waited


class Device:
    """A `symphony_serve.shell.Device`. Its models are those that have a process that is ready.
    One thing: which processes there are, and whose turn it is, change together.

    make: starts the process of a model on this device; it calls what it is given when its state is another one. turns:
    batches that run at a time; more than one in a pipeline of stages.
    """

    def __init__(self, make: Callable[[Loading, Callable[[], None]], Process], turns: int = 1):
        self._make, self._turn = make, asyncio.Semaphore(turns)
        #: By key of the model.
        self.processes: dict[str, Process] = {}
        #: Keys of models that get no batch any more.
        self.leaving: set[str] = set()
        #: Is called when `models` may have changed.
        self.changed: Callable[[], None] = lambda: None
        self._there = asyncio.Event()
        self._there.set()
        #: Whether the device was stopped.
        self.over = False

    @property
    def models(self) -> frozenset[str]:
        return frozenset(key for key in self._ready if key not in self.leaving)

    @property
    def _ready(self) -> list[str]:
        return [key for key, one in self.processes.items() if one.state == "ready"]

    @property
    def lost(self) -> bool:
        """Whether it is to have models, and none is ready."""
        return not self._ready and bool(self.processes)

    @property
    def loaded(self) -> bool:
        """Whether all processes are ready."""
        return len(self._ready) == len(self.processes)

    @property
    def trouble(self) -> str:
        """Why a model could not be loaded when that was last tried; "": each could."""
        return next((one.trouble for one in self.processes.values() if one.trouble), "")

    @property
    def samples(self) -> dict[str, Samples]:
        return {key: self.processes[key].samples for key in self._ready}

    @property
    def pids(self) -> list[int]:
        """The ids of its processes that have loaded."""
        return [pid for one in self.processes.values() for pid in one.pids]

    def want(self, loadings: Mapping[str, Loading]) -> None:
        """Have these models, by key, and no other ones: start and end processes."""
        before = dict(self.processes), set(self.leaving)
        for key in [key for key in self.processes if key not in loadings or self.over]:
            self.processes.pop(key).stop()
        for key, loading in loadings.items():
            if key not in self.processes and not self.over:
                self.processes[key] = self._make(loading, self._give)
        self.leaving &= self.processes.keys()
        if before != (self.processes, self.leaving):
            self._give()

    def leave(self, key: str) -> None:
        """The model gets no batch any more, and keeps its process until it is not wanted."""
        self.leaving.add(key)
        self._give()

    def stay(self, key: str) -> None:
        """The model that was leaving gets batches again, if it still has its process."""
        self.leaving.discard(key)
        self._give()

    def stop(self) -> None:
        """End all processes for good. The batch that runs is lost."""
        self.over = True
        self.want({})

    def _give(self) -> None:
        self._there.clear() if self.lost else self._there.set()
        self.changed()

    # Batches.

    async def run(self, model: str, inputs: list[Any], passed: Callable[[], None] | None = None) -> Waited:
        """An `Outcome` for each input. With DeviceLost the device has lost this model; others it may still have."""
        try:
            return await self._in_turn(model, lambda process: process.run(inputs, passed))
        except DeviceLost as lost:
            raise DeviceLost(str(lost), self._back) from None

    async def measure(self, model: str, inputs: list[Any], turn: bool = True) -> Waited:
        """As `run`, but what fails raises, and DeviceLost is over when the model is back. Raises ServeError if not.

        turn: whether the batch takes one. One that does not holds nobody up if it takes too long, or never ends.
        """
        if turn:
            return await self._in_turn(model, lambda process: process.measure(inputs))
        return await self._of(model).measure(inputs)

    @property
    def measured(self) -> Any:
        """The device as `measure_models` has it: with the models that it has now, and what fails raises."""
        return SimpleNamespace(models=self.models, run=self.measure)

    async def _in_turn(self, model: str, run: Callable[[Process], Awaitable[Waited]]) -> Waited:
        began, waits = time.monotonic(), self._turn.locked()
        async with self._turn:
            waited = time.monotonic() - began if waits else 0.0
            outcomes, seconds = await run(self._of(model))
            return Waited(outcomes, seconds + waited)

    def _of(self, model: str) -> Process:
        process = self.processes.get(model)
        if process is None:
            raise DeviceLost(f"the process of model {model} was ended", _never_back)
        return process

    async def check(self) -> None:
        """Ask the processes, which are idle, whether they are there. Raises DeviceLost if none is."""
        await asyncio.gather(*[self.processes[key].check() for key in self._ready])
        if self.lost:
            raise DeviceLost("it is idle, and no process of it answers", self._back)

    async def _back(self) -> bool:
        """Wait a while until a process is ready, and say whether one is."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._there.wait(), LOOK_S)
        return not self.lost


async def _never_back() -> bool:
    raise ServeError("its process was ended")
