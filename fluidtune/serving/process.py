"""The front's side of a process that holds one model: starts it, calls it, and starts the next one when it has died.

`STATES` has the states of a process and what changes them; docs/serving-decisions.md draws them, and a test holds the
two equal. All times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from fluidtune.cluster.forks.forked import ForkedActors
from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.ray_compat.accelerators import options_of
from fluidtune.serving.loaded_model import Packed, Samples
from fluidtune.serving.model_layers import Stage
from fluidtune.serving.model_process import Loading, ModelProcess, Place
from fluidtune.serving.model_versions import labels
from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.shell.device import Waited

logger = logging.getLogger(__name__)

#: Seconds after which a batch that has not ended ends its process. `AsyncServer` has given the batch up long before,
#: after three times its time; a process that is only slow may answer others later.
HUNG_S = 60.0
#: Seconds for a process to start and to load its model; then another one is tried. torch's import takes ten on a busy
#: machine, and a model of many gigabytes takes minutes to read.
LOAD_S = 600.0
#: Seconds within which an idle process must answer, else it gets no batch until it does; as
#: `async_server.LEAST_PATIENCE_S`, for the same reason.
CHECK_S = 1.0
#: Seconds of one wait for a process, and the pause before another one is tried.
LOOK_S, PAUSE_S = 0.2, 1.0
#: The part of a device that one of its processes takes in Ray's books. Its placement group takes the device whole.
#: Source: Ray counts resources to four decimal places.
PART = 0.001

#: ``loading``: a process starts, and loads the model. ``failed``: it could not; the next one waits. ``ready``: it takes
#: batches. ``silent``: it is idle and does not answer. ``ended``: there is to be no process any more.
State = Literal["loading", "failed", "ready", "silent", "ended"]

#: By state and event, the next state. Any other event changes nothing.
STATES: dict[tuple[State, str], State] = {
    ("loading", "loaded"): "ready",
    ("loading", "not loaded"): "failed",
    ("failed", "pause over"): "loading",
    ("ready", "no answer"): "silent",
    ("silent", "answer"): "ready",
    ("ready", "lost"): "loading",
    ("silent", "lost"): "loading",
    ("loading", "stop"): "ended",
    ("failed", "stop"): "ended",
    ("ready", "stop"): "ended",
    ("silent", "stop"): "ended",
}


async def fetched(reference: Any, wait_s: float) -> Any:
    """As ``ray.get`` with a time-out, on the event loop. Raises GetTimeoutError and what ``ray.get`` raises."""
    told = asyncio.wrap_future(reference.future())
    # Ray gives an answer that comes late all the same, when nobody waits for it any more.
    told.add_done_callback(lambda late: late.cancelled() or late.exception())
    # Not `wait_for`, which would cancel it.
    if not (await asyncio.wait([told], timeout=wait_s))[0]:
        raise GetTimeoutError(f"no answer within {wait_s} s")
    return told.result()


class Process:
    """A process with a model (`ModelProcess`), and after its death the next one, until `stop`.

    number: the device's. loading: has the model as its one trial. resources: those of the whole device, by Ray's
    names. group: holds the device; None: nothing does. tell: is called with an event of the log and its
    fields when a process is there, and when one is lost. changed: is called when the state is another one. forks: has
    the process forked; None: it is started as Ray does. It belongs to the event loop that runs when it is made.
    """

    #: The class of its actors, made once as Ray exports each one that is made; and how many batches it has at a time.
    ACTOR: Any = ray.remote(ModelProcess)
    BATCHES = 1

    def __init__(
        self,
        number: int,
        loading: Loading,
        resources: Mapping[str, float],
        group: Any,
        tell: Callable[..., None],
        changed: Callable[[], None],
        forks: ForkedActors | None = None,
    ):
        self._number, self._loading, self._resources, self._group = number, loading, resources, group
        self._tell_log, self._changed, self._forks = tell, changed, forks
        self.key = loading.trials[0].name
        trial, version = labels(self.key)
        self._name = f"models-{number}-{trial}" if version == "1" else f"models-{number}-{trial}-{version}"
        self.state: State = "loading"
        #: Of its process, when it has loaded the model; of a pipeline those of all stages.
        self.pids: list[int] = []
        self.samples, self.bytes = Samples([], []), 0
        #: Of a pipeline, what its stages hold.
        self.stages: list[Stage] = []
        #: Why the latest process could not load the model; "": it could, or none has tried.
        self.trouble = ""
        self._batches = asyncio.Semaphore(self.BATCHES)
        #: How many processes it has had.
        self._processes = 0
        #: The question that an idle process has not answered.
        self._asked: Any = None
        #: Is set when the state is another one, and then replaced.
        self._moved = asyncio.Event()
        self._start()
        self._life = asyncio.get_running_loop().create_task(self._live(), name="serve-process")

    # Its life.

    def _handle(self, event: str) -> None:
        after = STATES.get((self.state, event))
        if after is not None:
            self.state = after
            self._moved.set()
            self._moved = asyncio.Event()
            self._changed()

    async def _live(self) -> None:
        while self.state != "ended":
            moved = self._moved
            try:
                if self.state == "loading":
                    await self._load()
                elif self.state == "failed":
                    self._start()
                    self._handle("pause over")
                elif self.state == "silent":
                    await self._listen()
                else:
                    await moved.wait()
            except Exception:
                logger.exception("The process of model %s on device %d", self.key, self._number)
                await asyncio.sleep(PAUSE_S)

    def _start(self) -> None:
        runtime_env = self._forks.runtime_env() if self._forks is not None else {}
        # Ray would restart it at once and for ever; here it is tried again after a pause, and the reason is logged.
        self._actors = self._make({"max_restarts": 0, "runtime_env": runtime_env or None})
        self._told, self._began = self._ask("ready"), time.monotonic()
        self._processes += 1

    def _make(self, options: Mapping[str, Any]) -> list[Any]:
        """Its actors with these of Ray's options: one."""
        return [self.ACTOR.options(**options, **self._place_of(0)).remote(self._loading)]

    def _place_of(self, bundle: int) -> dict[str, Any]:
        """Ray's options for an actor on this bundle of the device."""
        options = options_of({name: PART if each else each for name, each in self._resources.items()})
        if self._group is None:
            node = ray.get_runtime_context().get_node_id()
            return {**options, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
        return {**options, "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle)}

    def _ask(self, what: str, *given: Any) -> Any:
        """Ray's reference to what the process answers."""
        return getattr(self._actors[0], what).remote(*given)

    async def _load(self) -> None:
        try:
            answer = await fetched(self._told, self._began + LOAD_S - time.monotonic())
        except RayError as error:
            if self._plainly(error):
                self._replace()
                return
            why = _own(error) or (
                f"a process has ended before it had loaded the model ({said_of(error)}); does load end it, or need "
                "more memory than there is?"
            )
            if isinstance(error, GetTimeoutError):
                why = f"no process has loaded model {self.key} within {LOAD_S:.0f} s; is there a free device, and does "
                why += "load end?"
            self._kill()
            self._handle("not loaded")
            # What ends a process together with its device is known by then.
            await asyncio.sleep(PAUSE_S)
            if why != self.trouble:  # Else it was told already.
                self.trouble = why
                self._say_lost(why)
            return
        self._take_in(answer)
        self.trouble = ""
        seconds = time.monotonic() - self._began
        self._tell_log("worker_started", worker=self._worker, device=self._number, pid=self.pids[0], seconds=seconds)
        self._handle("loaded")

    def _take_in(self, answer: Any) -> None:
        """What the process answers when it is ready: here a `model_process.Ready`."""
        pid, self.samples, self.bytes = answer
        self.pids = [pid]

    async def _listen(self) -> None:
        """Wait until it answers."""
        processes = self._processes
        try:
            await fetched(self._asked, HUNG_S)
        except RayError as error:
            self._lose(said_of(error), processes)
        else:
            self._handle("answer")

    def _lose(self, why: str, processes: int) -> None:
        """It is gone, or of no use: start the next one, unless that was done since it was the one with this number."""
        if processes == self._processes and self.state in ("ready", "silent"):
            self._say_lost(why)
            self._replace()
            self._handle("lost")

    def _replace(self) -> None:
        self._kill()
        self._start()

    def _kill(self) -> None:
        self.pids = []
        for actor in self._actors:
            ray.kill(actor)

    def _say_lost(self, why: str) -> None:
        self._tell_log("worker_lost", worker=self._worker, device=self._number, reason=why)

    @property
    def _worker(self) -> str:
        return f"{self._name}-{self._processes}"

    def _plainly(self, error: Exception) -> bool:
        """Whether the process must not be a forked one, and the next one will not be."""
        why = NeedsPlainProcess.said_by(error)
        if why is None or self._forks is None:
            return False
        self._forks.turn_off(why)
        return True

    # What its device asks.

    def stop(self) -> None:
        """End it. The batch that it runs is lost."""
        self._handle("stop")
        self._life.cancel()
        self._kill()

    async def loaded(self) -> None:
        """Wait until it is ready. Raises ServeError if the model cannot be loaded, or if it is stopped."""
        while self.state != "ready":
            if self.trouble or self.state == "ended":
                raise ServeError(self.trouble or "its process was ended")
            await self._moved.wait()

    async def back(self) -> bool:
        """Wait a while for it, and say whether it is ready again. Raises as `loaded`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.loaded(), LOOK_S)
        return self.state == "ready"

    async def run(self, inputs: list[Any], passed: Callable[[], None] | None = None) -> Waited:
        """An `Outcome` for each input. Raises DeviceLost if there is no process, or none any more."""
        return await self._batch("run", inputs)

    async def measure(self, inputs: list[Any]) -> Waited:
        """As `run`, but what fails raises."""
        return await self._batch("measure", inputs)

    async def _batch(self, what: str, inputs: list[Any]) -> Waited:
        async with self._batches:
            self._check_ready()
            processes = self._processes
            try:
                return Waited(*await fetched(self._ask(what, [Packed.of(one) for one in inputs]), HUNG_S))
            except RayError as error:  # the process died, or cannot be reached, or hangs
                if isinstance(error, RayTaskError) and not self._plainly(error):
                    raise
                self._lose(said_of(error), processes)
                raise DeviceLost(said_of(error), self.back) from None

    def _check_ready(self) -> None:
        if self.state != "ready":
            raise DeviceLost(f"no process with model {self.key} is ready", self.back)

    async def check(self) -> None:
        """If it is idle, ask whether it is there. One that runs a batch says by it that it is."""
        if not self._batches.locked():
            await self.answers()

    async def answers(self) -> bool:
        """Whether it answers, when it has run the batch that it has."""
        async with self._batches:
            if self.state == "ready":
                processes, self._asked = self._processes, self._ask("alive")
                try:
                    await fetched(self._asked, CHECK_S)
                except GetTimeoutError:
                    if processes == self._processes:
                        self._handle("no answer")
                except RayError as error:
                    self._lose(said_of(error), processes)
        return self.state == "ready"

    async def place(self) -> Place:
        """Where it is. Raises ServeError if it does not answer."""
        try:
            return await fetched(self._ask("place"), HUNG_S)
        except RayError as error:
            raise ServeError(f"the process of device {self._number} does not answer ({said_of(error)})") from None


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
