"""One device with its processes: that of the version that serves, and one beside it for another version.

The processes take turns: one batch runs on the device at a time, also while a version is measured. docs/
serving-decisions.md says why a version is a process of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fluidtune.ray_compat.accelerators import VISIBLE_GPUS
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.model_layers import Stage
from fluidtune.serving.model_process import Loading, Place
from fluidtune.serving.remote_devices import LOAD_S, LOOK_S, RemoteDevice
from symphony_serve.errors import DeviceLost, Refused, ServeError
from symphony_serve.messages import Reason
from symphony_serve.shell.device import Waited


class VersionedDevice:
    """A `symphony_serve.shell.Device`. If the process that serves is lost, so is the device until it is back.

    A batch for the process beside is refused while that one is lost; the other version goes on. ``make``: starts a
    process that loads this with these of Ray's options. ``resources``: the options that take the device in Ray's books;
    one of its processes has them. ``beside``: what a process beside loads; None: there is none. ``turns``: batches that
    run at a time; more than one in a pipeline of stages, which has no process beside.

    One thing: the two processes share a device, its turns and its place in Ray's books.
    """

    def __init__(
        self,
        make: Callable[[Loading, Mapping[str, Any]], RemoteDevice],
        resources: Mapping[str, Any],
        loading: Loading,
        beside: Loading | None = None,
        turns: int = 1,
    ):
        self._make, self._resources, self._environment = make, resources, loading.environment
        self._main = self._holder = make(loading, resources)
        self._aside: RemoteDevice | None = None
        #: What the process beside loads or has loaded.
        self._wanted = beside
        #: The samples of both, when they have loaded.
        self._samples: dict[str, Samples] | None = None
        self._found: dict[str, Samples] | None = None
        self._turn, self._starting = asyncio.Semaphore(turns), asyncio.Lock()
        #: Of each process, as many as it runs batches at a time; a batch has one of them.
        self._turns, self._batches = turns, WeakKeyDictionary[RemoteDevice, asyncio.Semaphore]()
        #: Waits for the process beside, which was lost.
        self._returning: asyncio.Task[None] | None = None
        #: Whether the device was stopped.
        self.over = False

    @property
    def models(self) -> frozenset[str]:
        return self._main.models | (self._aside.models if self._aside is not None and self._found else frozenset())

    @property
    def pids(self) -> list[int]:
        """The ids of its processes that are there, that of the version that serves first."""
        both = (self._main, self._aside)
        return [pid for one in both if one is not None for pid in one.pids]

    @property
    def stages(self) -> list[Stage]:
        """Of a pipeline, what its stages hold; else none."""
        return self._main.stages

    def able(self, model: str) -> bool:
        """Whether a process with the model is there."""
        return any(one is not None and model in one.models and one.pid is not None for one in (self._main, self._aside))

    async def place(self) -> Place:
        """Where the process that serves is. Raises ServeError if it does not answer."""
        return await self._main.place()

    # Loading.

    async def look(self, wait_s: float = LOOK_S) -> dict[str, Samples] | None:
        """The samples of the models that serve, when they and what is beside have loaded.

        Raises ServeError if one cannot be loaded.
        """
        if self._samples is None:
            self._samples = await self._main.look(wait_s)
        if self._samples is None or (self._wanted is not None and await self.look_beside(wait_s) is None):
            return None
        return self._samples

    def load_beside(self, loading: Loading) -> None:
        """Have a process beside that loads this. `look_beside` starts it."""
        self._wanted = loading

    async def look_beside(self, wait_s: float = LOOK_S) -> dict[str, Samples] | None:
        """The samples of the process beside, if it has loaded within ``wait_s``. Raises ServeError if it cannot."""
        async with self._starting:
            wanted = self._wanted
            if self._found is not None or wanted is None:
                return self._found
            if self._aside is None:
                try:
                    place = await self._main.place()
                except ServeError:  # Its process is being replaced.
                    await asyncio.sleep(LOOK_S)
                    return None
                if self._wanted is not wanted or self.over:
                    return None
                self._aside = self._make(*self._beside(wanted, place))
            aside = self._aside
            found = await aside.look(wait_s)
            if aside is self._aside:
                self._found = found
            return self._found

    def _beside(self, loading: Loading, place: Place) -> tuple[Loading, dict[str, Any]]:
        """What a process loads, and Ray's options for it, that uses the device without taking it in Ray's books."""
        group = self._resources.get("scheduling_strategy")
        strategy = group if group is not None else NodeAffinitySchedulingStrategy(place.node, soft=False)
        environment = {**loading.environment, VISIBLE_GPUS: place.gpus} if place.gpus else loading.environment
        return replace(loading, environment=environment), {"num_cpus": 0, "scheduling_strategy": strategy}

    def again(self) -> None:
        """Start all processes anew."""
        wanted = self._wanted
        self.end_beside()
        self._wanted, self._samples = wanted, None
        self._main.again()

    def end_beside(self) -> None:
        """Have no process beside any more."""
        aside, self._aside, self._wanted, self._found = self._aside, None, None, None
        if self._returning is not None:
            self._returning.cancel()
        if aside is not None:
            aside.stop()
            if aside is self._holder:  # The next process of the other one takes the device in Ray's books.
                self._holder, self._main.resources = self._main, self._resources
                self._main.loading = replace(self._main.loading, environment=self._environment)

    def serve(self, model: str) -> None:
        """The process with this model is that of the version that serves, from now on."""
        if model in self._main.models or self._wanted is None:
            return
        self._wanted, wanted = self._main.loading, self._wanted
        if self._aside is not None:
            self._main, self._aside = self._aside, self._main
            self._samples, self._found = self._found, self._samples
        else:  # It loads still, and takes no batch yet.
            self._main.loading, self._samples = wanted, None
            self._main.again()

    def stop(self) -> None:
        """End the processes. The batch that runs is lost."""
        self.over = True
        self.end_beside()
        self._main.stop()

    # Batches.

    async def run(self, model: str, inputs: list[Any], passed: Callable[[], None] | None = None) -> Waited:
        """An `Outcome` for each input. Raises Refused if the process of another version than the serving is lost."""
        began, waits = time.monotonic(), self._turn.locked()
        async with self._turn:
            waited = time.monotonic() - began if waits else 0.0
            if model in self._main.models:
                main = self._main
                async with self._batch_of(main):
                    outcomes, seconds = await main.run(model, inputs, passed)
            else:
                outcomes, seconds = await self._run_beside(model, inputs)
            return Waited(outcomes, seconds + waited)

    async def _run_beside(self, model: str, inputs: list[Any]) -> Waited:
        aside = self._aside
        if aside is None or model not in aside.models or aside.pid is None:
            raise Refused(model, Reason.GPU_LOST)
        try:
            async with self._batch_of(aside):
                return await aside.run(model, inputs)
        except DeviceLost as lost:
            self._wait_for(aside, lost)
            raise Refused(model, Reason.GPU_LOST) from None

    def _batch_of(self, process: RemoteDevice) -> asyncio.Semaphore:
        return self._batches.setdefault(process, asyncio.Semaphore(self._turns))

    async def measure(self, model: str, inputs: list[Any]) -> Waited:
        """As `run`, but what fails raises."""
        began = time.monotonic()
        async with self._turn:
            waited = time.monotonic() - began
            outcomes, seconds = await self._measure(model, inputs)
            return Waited(outcomes, seconds + waited)

    async def measure_first(self, model: str, inputs: list[Any]) -> Waited:
        """As `measure`, but the batch takes no turn: one that takes too long, or never ends, holds nobody up."""
        return await self._measure(model, inputs)

    async def first_run(self, model: str, inputs: list[Any]) -> float:
        """The seconds of a batch, as `measure_first`. Raises ServeError if the process is lost."""
        began = time.monotonic()
        try:
            await self.measure_first(model, inputs)
        except DeviceLost as lost:
            raise ServeError(f"its process has ended, or hangs, while it was measured ({lost})") from None
        return time.monotonic() - began

    async def _measure(self, model: str, inputs: list[Any]) -> Waited:
        process = next((one for one in (self._main, self._aside) if one is not None and model in one.models), None)
        if process is None:
            raise ServeError("its process was ended while it was measured")
        try:
            async with self._batch_of(process):
                return await process.measure(model, inputs)
        except DeviceLost as lost:
            raise DeviceLost(str(lost), self._measures_again(process, lost)) from None

    def _measures_again(self, process: RemoteDevice, lost: DeviceLost) -> Callable[[], Awaitable[bool]]:
        """As ``lost.back``, which raises ServeError if the process is not to come back, or takes too long."""
        until = time.monotonic() + LOAD_S

        async def back() -> bool:
            if self.over or process not in (self._main, self._aside):
                raise ServeError("its process was ended while it was measured")
            if time.monotonic() > until:
                raise ServeError(
                    f"its process has ended while it was measured ({lost}), and no other one has loaded it"
                )
            return await lost.back()

        return back

    async def check(self) -> None:
        """Ask the processes, which are idle, whether they are there. Raises DeviceLost if the serving one is not."""
        aside = self._aside
        # One that runs a batch says by it that it is there.
        if self._found is not None and aside is not None and not self._waits and not self._batch_of(aside).locked():
            await self.check_beside()
        await self._main.check()

    async def check_beside(self, wait_s: float = 0.0) -> bool:
        """Whether the process beside answers, when it has run the batch that it has.

        If not, it is waited for. Then it is asked once more, if it is there again within ``wait_s`` seconds.
        """
        if await self._answers_beside():
            return True
        returning = self._returning
        if returning is None or not wait_s:
            return False
        await asyncio.wait([returning], timeout=wait_s)
        return await self._answers_beside()

    async def _answers_beside(self) -> bool:
        aside = self._aside
        if aside is None:
            return False
        async with self._batch_of(aside):
            """The batch that it had is over. What it is asked now, it is asked before the next one."""
        if aside is not self._aside or aside.pid is None or self._waits:
            return False
        try:
            await aside.check()
        except DeviceLost as lost:
            self._wait_for(aside, lost)
            return False
        return True

    @property
    def _waits(self) -> bool:
        return self._returning is not None and not self._returning.done()

    def _wait_for(self, aside: RemoteDevice, lost: DeviceLost) -> None:
        """See when the process beside, or the next one, is there again."""

        async def waits() -> None:
            while aside is self._aside and not await lost.back():
                pass

        if not self._waits:
            self._returning = asyncio.create_task(waits(), name="serve-beside")
