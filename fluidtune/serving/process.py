"""The front's side of a process that holds one model: starts it, calls it, and starts the next one when it has died.

A model in stages has a chain of processes, which is one process here: when one of them ends, all end, and all start
anew with the same cut. `STATES` has the states of a process and what changes them; docs/serving-decisions.md draws
them, and a test holds the two equal. All times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from fluidtune.cluster.forks.forked import ForkedActors
from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.ray_compat.accelerators import options_of
from fluidtune.serving.loaded_model import Outcome, Packed, Samples
from fluidtune.serving.model_layers import Stage
from fluidtune.serving.model_process import Loading, ModelProcess, Passed, Place, Started
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
#: The batches that found a chain empty of which the time between stages is remembered. Judgement: its median is exact
#: to a tenth of its spread.
HOPS = 64

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
    """A process with a model (`ModelProcess`), or a chain of them, and after its death the next one, until `stop`.

    number: the device's. loading: has the model as its one trial. resources: those of the whole device, by Ray's
    names. group: holds the device; None: nothing does. tell: is called with an event of the log and its
    fields when a process is there, and when one is lost. changed: is called when the state is another one. forks: has
    the process forked; None: it is started as Ray does. stages: of which the chain consists, each with ``room`` bytes
    of weights at most; several batches may be in it. It belongs to the event loop that runs when it is made.
    """

    #: The class of its actors, made once as Ray exports each one that is made.
    ACTOR: Any = ray.remote(ModelProcess)

    def __init__(
        self,
        number: int,
        loading: Loading,
        resources: Mapping[str, float],
        group: Any,
        tell: Callable[..., None],
        changed: Callable[[], None],
        forks: ForkedActors | None = None,
        stages: int = 1,
        room: float = math.inf,
    ):
        self._number, self._loading, self._resources, self._group = number, loading, resources, group
        self._count, self._room = stages, room
        self._tell_log, self._changed, self._forks = tell, changed, forks
        self.key = loading.trials[0].name
        trial, version = labels(self.key)
        self._name = f"models-{number}-{trial}" if version == "1" else f"models-{number}-{trial}-{version}"
        self.state: State = "loading"
        #: Of its process, when it has loaded the model; of a chain those of all stages.
        self.pids: list[int] = []
        self.samples, self.bytes = Samples([], []), 0
        #: Of a chain, what its stages hold.
        self.stages: list[Stage] = []
        #: Why the latest process could not load the model; "": it could, or none has tried.
        self.trouble = ""
        #: The batches that may be in it; how many are; and what is set when the latest one is not any more.
        self._batches = asyncio.Semaphore(1 if stages == 1 else 2 * stages)
        self._flying, self._latest = 0, asyncio.Event()
        self._latest.set()
        #: Seconds that batches which found it empty took, besides those within stages.
        self._hops: deque[float] = deque([0.0], maxlen=HOPS)
        #: How many processes it has had.
        self._processes = 0
        #: The question that an idle process has not answered.
        self._asked: Any = None
        #: Is set when the state is another one, and then replaced.
        self._moved = asyncio.Event()
        self._start()
        self._task = asyncio.get_running_loop().create_task(self._live(), name="serve-process")

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
        options = {"max_restarts": 0, "runtime_env": runtime_env or None}
        made = [self.ACTOR.options(**options, **self._place_of(stage)) for stage in range(self._count)]
        self._actors = [one.remote(self._loading, stage, self._count, self._room) for stage, one in enumerate(made)]
        self._told, self._began = self._ask("ready", Started(stages=tuple(self.stages))), time.monotonic()
        self._processes += 1

    def _place_of(self, bundle: int) -> dict[str, Any]:
        """Ray's options for an actor on this bundle of the device."""
        options = options_of({name: PART if each else each for name, each in self._resources.items()})
        if self._group is None:
            node = ray.get_runtime_context().get_node_id()
            return {**options, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
        return {**options, "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle)}

    def _ask(self, what: str, told: Any = None, first: int = 0) -> Any:
        """Ray's reference to what the last process answers. Each gets what the one before answers. first: its place."""
        for actor in self._actors[first:]:
            told = getattr(actor, what).remote(told)
        return told

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
        pids, self.samples, stages, self.bytes = answer
        self.pids, self.stages = list(pids), list(stages)
        self.trouble = ""
        seconds = time.monotonic() - self._began
        self._tell_log("worker_started", worker=self._worker, device=self._number, pid=self.pids[0], seconds=seconds)
        self._handle("loaded")

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
        self._task.cancel()
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
        """An `Outcome` for each input, and the seconds that the batch has waited for a turn, or stood before stages.

        Batches return in the order in which they were given. passed: is called when the batch has left the first of
        several stages. Raises DeviceLost if there is no process, or none any more.
        """
        async with self._in_order() as before:
            packed = [Packed.of(one) for one in inputs]
            whole, waited = await self._through("run", packed, before, passed)
            if whole.failed is None:
                return Waited(whole.value, waited)
            if len(packed) == 1:
                return Waited([whole.failed], waited)
            outcomes: list[Outcome] = []
            for one in packed:
                alone = (await self._through("run", [one], before))[0]
                outcomes += [alone.failed] if alone.failed is not None else alone.value
            return Waited(outcomes, waited)

    async def measure(self, inputs: list[Any]) -> Waited:
        """As `run`, but what fails raises."""
        async with self._in_order() as before:
            batch, waited = await self._through("measure", [Packed.of(one) for one in inputs], before)
        if batch.failed is not None:
            raise ServeError(json.loads(batch.failed[1])["error"])
        return Waited(batch.value, waited if self._count == 1 else 0.0)

    @contextlib.asynccontextmanager
    async def _in_order(self) -> AsyncIterator[asyncio.Event]:
        """What is set when the batch before this one is not in it any more; this one is within the context."""
        async with self._batches:
            before, self._latest = self._latest, (ended := asyncio.Event())
            try:
                yield before
            finally:
                ended.set()

    async def _through(
        self, what: str, inputs: list[Packed], before: asyncio.Event, passed: Callable[[], None] | None = None
    ) -> tuple[Passed, float]:
        """The batch after all stages, and the seconds that it has stood before them, or behind the batch before it.

        Raises DeviceLost. ``before``: see `_in_order`. ``passed``: is called when it has left the first stage.
        """
        if self.state != "ready":
            raise DeviceLost(f"no process with model {self.key} is ready", self.back)
        began, empty, processes = time.monotonic(), not self._flying, self._processes
        self._flying += 1
        try:
            try:
                batch: Passed = await fetched(self._sent(what, Passed(inputs, len(inputs)), passed), HUNG_S)
                besides = time.monotonic() - began - sum(batch.seconds)
            except RayError as error:  # the process died, or cannot be reached, or hangs
                plainly = processes == self._processes and self._plainly(error)
                if self._count == 1 and isinstance(error, RayTaskError) and not plainly:
                    raise
                self._lose(said_of(error), processes)
                await before.wait()
                raise DeviceLost(said_of(error), self.back) from None
            there = time.monotonic()
            await before.wait()
            stood = time.monotonic() - there
        finally:
            self._flying -= 1
        if not empty:
            return batch, max(0.0, besides - statistics.median(self._hops)) + stood
        if batch.failed is None:
            self._hops.append(besides)
        return batch, batch.waited

    def _sent(self, what: str, batch: Passed, passed: Callable[[], None] | None) -> Any:
        """Ray's reference to the batch after all stages. ``passed``: see `_through`."""
        if passed is None or self._count == 1:
            return self._ask(what, batch)
        told, left = self._actors[0].run_first.options(num_returns=2).remote(batch)
        loop = asyncio.get_running_loop()

        def hear(answer: Any) -> None:
            if answer.exception() is None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(passed)

        left.future().add_done_callback(hear)
        return self._ask(what, told, first=1)

    async def check(self) -> None:
        """If it is idle, ask whether it is there. One that runs a batch says by it that it is."""
        if not self._flying:
            await self.answers()

    async def answers(self) -> bool:
        """Whether it answers, when it has run the batches that it has. A chain that has others by then does."""
        await self._latest.wait()
        async with self._batches:
            if self.state == "ready" and not self._flying:
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
        """Where it is, of a chain its last stage. Raises ServeError if it does not answer."""
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
