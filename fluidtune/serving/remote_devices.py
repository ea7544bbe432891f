"""The front's side of a process that holds models: starts it, calls it, and replaces it when it has died.

`PlacedDevice` is one whose models come and go. `versioned_device` has those of one device, `served_devices` those of a
service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from fluidtune.cluster.forks.forked import ForkedActors
from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.serving.loaded_model import Packed, Samples
from fluidtune.serving.model_layers import Stage
from fluidtune.serving.model_process import Held, Loading, ModelProcess, Place
from fluidtune.serving.model_versions import labels
from fluidtune.serving.winners import Winner
from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.shell.device import Waited

#: Seconds after which a batch that has not ended ends its process. `AsyncServer` has given the batch up long before,
#: after three times its time; a process that is only slow may answer others later.
HUNG_S = 60.0
#: Seconds for a process to start and to load the models; then another one is tried. torch's import takes ten on a busy
#: machine, and a model of many gigabytes takes minutes to read.
LOAD_S = 600.0
#: Seconds within which an idle process must answer, else it gets no batch until it does; as
#: `async_server.LEAST_PATIENCE_S`, for the same reason.
CHECK_S = 1.0
#: Seconds that one look waits, and the pause before another process is tried.
LOOK_S, PAUSE_S = 0.2, 1.0


async def fetched(reference: Any, wait_s: float) -> Any:
    """As ``ray.get`` with a time-out, on the event loop. Raises GetTimeoutError and what ``ray.get`` raises."""
    told = asyncio.wrap_future(reference.future())
    # Not `wait_for`, which would cancel it: Ray gives an answer that comes late all the same.
    done, _ = await asyncio.wait([told], timeout=wait_s)
    if not done:
        told.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise GetTimeoutError(f"no answer within {wait_s} s")
    return told.result()


class RemoteDevice:
    """A process of a device (`ModelProcess`), and after its death the next one. A `symphony_serve.shell.Device`.

    number: the device's number. resources: Ray's options for the process, such as ``num_gpus``. tell: is called with an
    event and its fields when a process is there, and when one is lost. forks: has the process forked; None: it is
    started as Ray does.
    """

    #: The class of its processes.
    PROCESS: type = ModelProcess

    def __init__(
        self,
        number: int,
        loading: Loading,
        resources: Mapping[str, float],
        tell: Callable[..., None],
        forks: ForkedActors | None = None,
    ):
        # Ray exports each class of actors that is made: once for all processes of the device.
        self._class = ray.remote(self.PROCESS)
        #: What its next process has and loads.
        self.resources, self.loading = resources, loading
        self._number, self._tell, self._forks = number, tell, forks
        version = labels(loading.trials[0].name)[1] if loading.trials else "1"
        self._name = f"models-{number}" if version == "1" else f"models-{number}-{version}"
        #: How many processes it has had.
        self._processes = 0
        #: The id of its process; None: it is not there.
        self.pid: int | None = None
        #: The question that its idle process has not answered, and when it is given up; None: there is none.
        self._asked: tuple[Any, float] | None = None
        #: Of a pipeline, what its stages hold.
        self.stages: list[Stage] = []
        #: Why its latest process has not loaded the models; "": it has.
        self.trouble = ""
        #: Whether there is to be no process any more.
        self._over = False
        self._start()

    @property
    def models(self) -> frozenset[str]:
        return frozenset(trial.name for trial in self.loading.trials)

    def _start(self) -> None:
        runtime_env = self._forks.runtime_env() if self._forks is not None else {}
        # Ray would restart it at once and for ever; here it is tried again after a pause, and the reason is logged.
        options = {"max_restarts": 0, **self.resources, "runtime_env": runtime_env or None}
        self._actors = self._make(options)
        self._told = self._ask("ready")
        self._began = time.monotonic()
        self._processes += 1
        self._worker = f"{self._name}-{self._processes}"

    def _make(self, options: Mapping[str, Any]) -> list[Any]:
        """Its processes, which Ray starts with these options: one."""
        return [self._class.options(**options).remote(self.loading)]

    def _ask(self, what: str, *given: Any) -> Any:
        """Ray's reference to what the process answers."""
        return getattr(self._actors[0], what).remote(*given)

    def _take_in(self, answer: Any) -> dict[str, Samples]:
        """The samples in what the process answers when it is ready. Raises ServeError."""
        self.pid, samples = answer
        return samples

    @property
    def pids(self) -> list[int]:
        """The ids of its processes, if they are there."""
        return [self.pid] if self.pid is not None else []

    async def look(self, wait_s: float = LOOK_S) -> dict[str, Samples] | None:
        """The samples of each model, if the process is there within ``wait_s`` seconds.

        Raises ServeError if a model cannot be loaded.
        """
        asked = self._told
        try:
            answer = await fetched(asked, wait_s)
        except GetTimeoutError:
            if time.monotonic() > self._began + LOAD_S:
                said = f"no process has loaded the models within {LOAD_S:.0f} s"
                raise ServeError(f"{said}; is there a free device, and does load end?")
            return None
        except RayError as error:
            if self._plainly(error):
                self.again()
                return None
            ended = f"a process has ended before it had loaded the models ({said_of(error)})"
            raise ServeError(_own(error) or f"{ended}; does load end it, or need more memory than there is?") from None
        if asked is not self._told:
            return None  # Another process was started meanwhile.
        new, samples = self.pid is None, self._take_in(answer)
        self.trouble = ""
        if new:
            seconds = time.monotonic() - self._began
            self._tell("worker_started", worker=self._worker, device=self._number, pid=self.pid, seconds=seconds)
        return samples

    @property
    def _patience(self) -> float:
        """Seconds after which a process that does not answer is replaced."""
        return HUNG_S

    async def run(self, model: str, inputs: list[Any], passed: Callable[[], None] | None = None) -> Waited:
        """An `Outcome` for each input."""
        return await self._batch("run", model, inputs, self._patience)

    async def measure(self, model: str, inputs: list[Any]) -> Waited:
        """As `run`, but what fails raises."""
        return await self._batch("measure", model, inputs, HUNG_S)

    async def _batch(self, what: str, model: str, inputs: list[Any], wait_s: float) -> Waited:
        processes = self._processes
        try:
            return Waited(*await fetched(self._ask(what, model, [Packed.of(one) for one in inputs]), wait_s))
        except RayError as error:  # the process died, or cannot be reached, or hangs
            if isinstance(error, RayTaskError) and not self._plainly(error):
                raise
            self._replace(said_of(error), processes)
            raise DeviceLost(said_of(error), self._back) from None

    async def place(self) -> Place:
        """Where its process is. Raises ServeError if it does not answer."""
        try:
            return await fetched(self._ask("place"), HUNG_S)
        except RayError as error:
            raise ServeError(f"the process of device {self._number} does not answer ({said_of(error)})") from None

    async def check(self) -> None:
        """Ask the process, which is idle, whether it is there. Raises DeviceLost if it does not answer."""
        self._asked = self._ask("alive"), time.monotonic() + self._patience
        if not await self._answers(CHECK_S):
            raise DeviceLost("it is idle and does not answer", self._back)

    async def _answers(self, wait_s: float) -> bool:
        """Whether the process answers what it was asked, within ``wait_s``. One that has died is replaced."""
        assert self._asked is not None
        (told, until), processes = self._asked, self._processes
        try:
            await fetched(told, wait_s)
        except RayError as error:
            if isinstance(error, GetTimeoutError) and time.monotonic() < until:
                return False
            self._replace(said_of(error), processes)
            return False
        if processes != self._processes:
            return False
        self._asked = None
        return True

    async def _back(self) -> bool:
        """What `DeviceLost` asks until it is True: whether the process, or the next one, is there again."""
        if self._asked is not None:
            return await self._answers(LOOK_S)
        processes = self._processes
        try:
            return await self.look() is not None
        except ServeError as error:
            await asyncio.sleep(PAUSE_S)
            if processes != self._processes:
                return False  # Another process was started meanwhile.
            if str(error) == self.trouble:  # It was told already.
                self.again()
            else:
                self.trouble = str(error)
                self._replace(self.trouble, processes)
            return False

    def _replace(self, why: str, processes: int) -> None:
        """Start another process, unless that was done since it was the one with this number."""
        if not self._over and processes == self._processes:
            self._tell("worker_lost", worker=self._worker, device=self._number, reason=why)
            self.again()

    def again(self) -> None:
        """End the process and start another one, unless the device was stopped."""
        self.pid = self._asked = None
        for actor in self._actors:
            ray.kill(actor)
        if not self._over:
            self._start()

    def stop(self) -> None:
        """End the process. The batch that it runs is lost."""
        self._over = True
        self.again()

    def _plainly(self, error: Exception) -> bool:
        """Whether the process must not be a forked one, and the next one will not be."""
        why = NeedsPlainProcess.said_by(error)
        if why is None or self._forks is None:
            return False
        self._forks.turn_off(why)
        return True


class _MustBePlain(ServeError):
    """The model loads in a plain process alone. The device has one now, without a model."""


class PlacedDevice(RemoteDevice):
    """A process whose models come and go while it runs. Its next one begins without a model.

    lost: is called when the process is gone, and before there is another one.
    """

    def __init__(self, *given: Any):
        self.lost: Callable[[], None] = lambda: None
        #: One model loads at a time: what ends the process, or takes memory, is then known to be that one.
        self._loads = asyncio.Lock()
        super().__init__(*given)

    @property
    def _patience(self) -> float:
        # What loads may keep Python from doing anything else.
        return LOAD_S if self._loads.locked() else HUNG_S

    def again(self) -> None:
        if not self._over:
            self.loading = replace(self.loading, trials=())
            self.lost()
        super().again()

    async def measure(self, model: str, inputs: list[Any]) -> Waited:
        """As `RemoteDevice.measure`. A device that is lost is back when it has loaded again what it had."""
        trials = self.loading.trials
        try:
            return await super().measure(model, inputs)
        except DeviceLost as lost:
            raise DeviceLost(str(lost), self._loaded_again(trials, lost)) from None

    def _loaded_again(self, trials: Sequence[Winner], lost: DeviceLost) -> Callable[[], Awaitable[bool]]:
        """As ``lost.back``, with these models. It raises ServeError if one does not load."""

        async def back() -> bool:
            if not await lost.back():
                return False
            for trial in trials:
                if trial.name not in self.models:
                    await self.load(trial)
            return True

        return back

    async def load(self, trial: Winner) -> Held:
        """Have it load one more model beside the batches. Raises ServeError if it cannot; it has nothing of it then.

        A model that loads in a plain process alone is loaded in one; the device's other models are lost then.
        """
        async with self._loads:
            try:
                found = await self._load(trial)
            except _MustBePlain:
                found = await self._load(trial)
            self.loading = replace(self.loading, trials=(*self.loading.trials, trial))
            return found

    async def _load(self, trial: Winner) -> Held:
        """Load it in the process that there is now. Raises ServeError."""
        actor, processes, until = self._actors[0], self._processes, time.monotonic() + LOAD_S
        try:
            await fetched(actor.hold.remote(trial), LOAD_S)
            while (found := await self._held(actor, trial.name, until)) is None:
                await asyncio.sleep(LOOK_S)
        except RayTaskError as error:
            if self._plainly(error):
                self._replace("it must not be a forked process", processes)
                raise _MustBePlain(said_of(error)) from None
            raise ServeError(said_of(error)) from None
        except RayError as error:
            said = f"the process ended while it loaded model {trial.name} ({said_of(error)})"
            if isinstance(error, GetTimeoutError):
                said = f"model {trial.name} has not loaded within {LOAD_S:.0f} s; does load end?"
            self._replace(said, processes)
            raise ServeError(said) from None
        if processes != self._processes:
            raise ServeError(f"the process ended when it had loaded model {trial.name}")
        return found

    async def _held(self, actor: Any, model: str, until: float) -> Held | None:
        """As `ModelProcess.held`. Raises GetTimeoutError if there is no answer until then, on `time.monotonic`."""
        return await fetched(actor.held.remote(model), max(0.0, until - time.monotonic()))

    async def unload(self, model: str) -> None:
        """Have it let go of the model. No batch of it may be on its way. A process that has ended has let go of it."""
        self.loading = replace(self.loading, trials=tuple(one for one in self.loading.trials if one.name != model))
        processes = self._processes
        try:
            await fetched(self._ask("drop", model), LOAD_S)
        except GetTimeoutError:
            self._replace(f"it has not let go of model {model} within {LOAD_S:.0f} s", processes)
        except RayError:
            """It has ended."""


def _own(error: BaseException) -> str | None:
    """What the model's own process has said of the error; None: it has said nothing."""
    cause: BaseException = getattr(error, "cause", None) or error
    if isinstance(cause, ServeError):  # It was raised by what the process was asked; else Ray tells it as a text.
        return str(cause)
    own = [line for line in str(cause).splitlines() if "ServeError: " in line]
    return own[-1].split("ServeError: ", 1)[1] if own else None


def said_of(error: BaseException) -> str:
    """The error in one line; an error of the model's own process by its own text."""
    cause: BaseException = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return _own(error) or (text.splitlines()[-1] if text else type(cause).__name__)
