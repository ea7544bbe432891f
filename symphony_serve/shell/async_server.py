"""The server of one event loop: carries out the scheduler's instructions on the real clock. All times are seconds.

A request passes through `ask`, the scheduler, and the task of a device, which awaits the device with the inputs of a
batch. All of it runs on one event loop, so that nothing needs a lock; `call_later` keeps the time. No code of a user
runs on the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, NamedTuple

from symphony_serve.errors import Refused, ServeError
from symphony_serve.messages import (
    MAY_HAVE_RUN,
    SAME_MOMENT_S,
    BatchDone,
    BatchTook,
    Cancelled,
    Dispatch,
    Event,
    GpuHolds,
    GpuLeaving,
    GpuLost,
    ModelAdded,
    ModelGone,
    ModelRemoved,
    Reason,
    Refuse,
    Request,
    RequestArrived,
    StoodStill,
    Suspect,
    Tick,
    WakeAt,
)
from symphony_serve.model_side import Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.shell.device import Device
from symphony_serve.shell.device_slot import Sent, Slot

logger = logging.getLogger(__name__)

#: A batch that was not answered this many seconds after it was sent makes its device suspect, if it also took three
#: times its time: a loaded machine, or Python's garbage collector, lets processes stand still for some 100 ms.
LEAST_PATIENCE_S = 1.0
#: A loop that wakes this many seconds too late has stood still. While requests are open, it wakes at least that often.
#: Judgement: a tenth of `LEAST_PATIENCE_S`.
STALL_S = 0.1
#: How long a batch took is not learned if the loop stood still for more than this part of it. Judgement: the times of
#: batches vary by as much.
STALLED = 0.1


class Answer(asyncio.Future):
    """What becomes of a request: the model's output, the error that its function raised, or `Refused`.

    `cancel` takes the request out of its queue. If its batch was sent, the batch runs, and its output is dropped.
    """

    def __init__(self, server: AsyncServer, model: str, number: int, value: Any):
        super().__init__()
        self.server, self.model, self.number, self.value = server, model, number, value
        #: Whether its batch was sent once.
        self.sent = False

    def cancel(self, msg: Any | None = None) -> bool:
        """Do not want the answer any more. False: it is there."""
        cancelled = super().cancel(msg)
        if cancelled:
            self.server._open.pop(self.number, None)
            self.server.tell(Cancelled(self.model, self.number))
        return cancelled


class BatchSeen(NamedTuple):
    """A batch that a device has run.

    sent: when it was sent, or had its turn, on `time.monotonic`. seconds: from then until its outputs were there.
    waited: the seconds from the arrivals of its requests until ``sent``, added up. overlap: the last of ``seconds``, in
    which the device, a pipeline, could run the next one.
    """

    device: int
    model: str
    size: int
    sent: float
    seconds: float
    waited: float
    overlap: float = 0.0


class AsyncServer(AbstractAsyncContextManager["AsyncServer"]):
    """Answers requests to ``models``, each before its deadline, or refuses them.

    models: with profiles and delays, mostly from `measuring.measure_models`. Their jitter is what the loop may wake too
        late; with less, a batch that is deferred to its latest start is given up. devices: a mapping names them by
        number, as `join` does. held: by number, the models that a device has until `hold` says otherwise; a device that
        is not named there has all models.

    Each request is answered or refused exactly once. What waits is refused before its deadline, so that no queue is
    longer than what comes within an SLO. An answer is late if its batch takes longer than any of the latest ones. A
    batch that takes three times its time, and `LEAST_PATIENCE_S`, is given up: its device is lost until `Device.run`
    returns. Seconds in which the loop stood still do not count. An error that `run` raises is its batch's answer: each
    of the requests gets it. With `DeviceLost` the device is lost until the error's ``back`` returns True. The batch's
    requests go to another device, or are refused; one that has lost two devices is refused. ``watch`` is called with
    each batch after its requests were answered. A device without a batch for `device_slot.IDLE_S` is asked
    `Device.check`. Devices come and go by `join` and `leave`, models by `add` and `remove`. Use it as an async context
    manager, or `close` it. It belongs to the event loop that runs when it is made. Raises ServeError if a device lacks
    a model that it is to have.

    One thing: callers, timers and devices share the scheduler and its open requests.
    """

    def __init__(
        self,
        models: Sequence[Model],
        devices: Sequence[Device] | Mapping[int, Device],
        watch: Callable[[BatchSeen], None] | None = None,
        held: Mapping[int, frozenset[str]] | None = None,
    ):
        if not devices:
            raise ServeError("there are 0 devices, expected one at least")
        #: By name, those that take requests, and those that were removed and still have some.
        self._models = {model.name: model for model in models}
        numbered = dict(devices if isinstance(devices, Mapping) else enumerate(devices))
        held = held or {}
        for number, device in numbered.items():
            self._check(number, device, held.get(number))
        self._loop = asyncio.get_running_loop()
        self._watch = watch
        self._scheduler = self._decides(models)
        self._delays = models[0].delays
        self._jitter = max(model.delays.jitter for model in models)
        self._depth = max(model.profile.depth for model in models)
        #: When the scheduler wants to be woken, and when the timer will.
        self._wake = self._sleeps_until = math.inf
        self._timer: asyncio.TimerHandle | None = None
        #: When the loop was last seen to have stood still, and for how many seconds at the least.
        self._stalled = -math.inf, 0.0
        self._numbers = itertools.count()
        #: By number, what is neither answered nor refused.
        self._open: dict[int, Answer] = {}
        #: Whether all requests are refused: after `close`, or because the scheduler has failed.
        self.closed = False
        #: By number, the devices that are there; and of each that has left, its last token.
        self._slots: dict[int, Slot] = {}
        self._left: dict[int, int] = {}
        #: By name, the models that were removed and still have requests.
        self._going: dict[str, asyncio.Future[None]] = {}
        for number, device in numbered.items():
            self.join(number, device, held.get(number))

    def _check(self, number: int, device: Device, held: frozenset[str] | None) -> None:
        wanted = self._models.keys() if held is None else held
        if not device.models >= wanted:
            said = f"device {number} has the models {sorted(device.models)}, expected {sorted(wanted)}"
            raise ServeError(f"{said}: every device has each model" if held is None else said)

    def _decides(self, models: Sequence[Model]) -> Any:
        """The `Scheduler`, or a `benchmarks.rival_servers.Server`, of which nothing but `handle` is called."""
        return Scheduler(models, least_patience=LEAST_PATIENCE_S)

    # What users call.

    def ask(self, model: str, value: Any, within: float = math.inf, source: str = "") -> Answer:
        """Ask ``model`` about one input, and await the answer. What is refused raises `Refused` there, and not here.

        within: seconds that are left for the request, if fewer than the model's SLO; the others were spent elsewhere.
        source: requests of one source take times of one distribution, where times vary. Raises ServeError if ``within``
        is no number of seconds.
        """
        arrival = time.monotonic()
        number = next(self._numbers)
        answer = self._open[number] = Answer(self, model, number, value)
        if self.closed:
            self._refuse(number, Reason.CLOSED)
        else:
            slo = self._models[model].slo if model in self._models else 0.0
            try:
                self.tell(RequestArrived(Request(number, model, arrival, arrival + min(within, slo), source)))
            except ServeError:
                self._open.pop(number, None)
                raise
        return answer

    def hopeless(self, model: str, within: float = math.inf, count: int = 1) -> Reason | None:
        """Why a request that comes now need not be read: a batch of 1, or what waits before it, takes too long.

        Or no such model is served. See `Scheduler.least_latency`. within: as for `ask`. count: requests that come now,
        of which one at least would be refused.
        """
        if self.closed:
            return None  # `ask` says why.
        if model not in self._models or model in self._going:
            return Reason.UNKNOWN_MODEL
        there = len(self._with(model))
        if not there:
            return None  # `ask` waits for a device.
        left = self._models[model].budget - max(0.0, self._models[model].slo - within)
        if self._scheduler.alone(model) > left:
            return Reason.LATE_ON_ARRIVAL
        least = self._scheduler.least_latency(model, there, time.monotonic(), count)
        return Reason.QUEUE_FULL if least > left else None

    def least_latency(self, model: str) -> float:
        """Seconds at the least until a request to ``model`` that came now would be answered; its SLO if none can be.

        0 if no such model is served: the request would be refused at once.
        """
        if model not in self._models:
            return 0.0
        there = len(self._with(model))
        return min(self._models[model].slo, self._scheduler.least_latency(model, there, time.monotonic()))

    def _with(self, model: str) -> list[Slot]:
        """The devices that stay and have the model; one that is lost is taken to come back."""
        return [one for one in self._slots.values() if not one.leaves and (one.models is None or model in one.models)]

    def join(self, number: int, device: Device, held: frozenset[str] | None = None) -> None:
        """A device comes, with all models or with those that it holds. Its batches are taken to take the known times.

        Raises ServeError if a device of that number is there, also one that leaves and still has a batch, or if it
        lacks a model that it is to have.
        """
        self._check(number, device, held)
        if number in self._slots:
            raise ServeError(f"device {number} is there already; let it leave first")
        slot = self._slots[number] = Slot(self, number, device, self._left.pop(number, 0) + 1, held, self._depth)
        if not self.closed:
            slot.begin()
            slot.join_again()

    def busy_with(self, number: int, model: str) -> bool:
        """Whether a batch of the model was sent to the device, and not all of it is answered."""
        return self._slots[number].busy_with(model)

    def hold(self, number: int, models: frozenset[str]) -> None:
        """The device gets batches of these models from now on, and of no other one. What was sent to it stays."""
        slot = self._slots.get(number)
        if slot is not None:
            slot.models = models
            self.tell(GpuHolds(number, models))

    def leave(self, number: int) -> None:
        """A device goes: it gets no batch any more, and answers what was sent to it. `devices` says when it has gone.

        Nothing happens if there is no device of that number.
        """
        slot = self._slots.get(number)
        if slot is not None and not slot.leaves and not self.closed:
            slot.leaves = True
            self.tell(GpuLeaving(number))
            slot.end()

    def add(self, model: Model) -> None:
        """One more model takes requests. Its delays are those of the models that are there: all have one event loop.

        Raises ServeError if a device that has all models lacks it, if one of its name is there, or if a batch of 1 with
        these delays takes longer than its SLO.
        """
        model = replace(model, delays=self._delays)
        if model.name in self._models:
            raise ServeError(f"model {model.name} is served already, expected another name")
        all_have = [slot for slot in self._slots.values() if slot.models is None]
        lacking = sorted(slot.number for slot in all_have if model.name not in slot.device.models)
        if lacking:
            raise ServeError(f"device {lacking[0]} has not the model {model.name}: every device has each model")
        self.tell(ModelAdded(model))
        self._models[model.name] = model

    async def remove(self, model: str) -> None:
        """A model takes no request any more. Returns when those that it has are answered or refused.

        Raises ServeError if no model of that name is served.
        """
        if self.closed:
            return
        self._check_served(model)
        gone = self._going.get(model)
        if gone is None:
            gone = self._going[model] = self._loop.create_future()
            self.tell(ModelRemoved(model))
        await asyncio.shield(gone)  # Somebody else may wait for it as well.

    @property
    def devices(self) -> frozenset[int]:
        """The numbers of the devices that are there, with those that leave and still have a batch."""
        return frozenset(self._slots)

    @property
    def able(self) -> int:
        """How many devices can be given a batch: those that neither leave nor are lost."""
        return sum(not slot.leaves and not slot.lost for slot in self._slots.values())

    def able_for(self, model: str) -> bool:
        """Whether a device can be given a batch of this model."""
        return any(not slot.lost for slot in self._with(model))

    def serves(self, model: str) -> bool:
        """Whether a model of that name is served, or was until the last of its requests is answered."""
        return model in self._models

    def profile(self, model: str) -> Profile:
        """The model's profile as it is known now. Raises ServeError if no model of that name is served."""
        self._check_served(model)
        return self._scheduler.profile(model)

    def batching(self, model: str) -> str:
        """The former that has the model's requests now: "window" or "orloj".

        Raises ServeError if no model of that name is served.
        """
        self._check_served(model)
        return self._scheduler.batching(model).value

    def _check_served(self, model: str) -> None:
        if model not in self._models:
            raise ServeError(f"no model {model} is served, expected one of {', '.join(sorted(self._models))}")

    @property
    def unanswered(self) -> int:
        """How many requests are neither answered nor refused."""
        return len(self._open)

    async def close(self, timeout: float = 10.0) -> None:
        """Refuse all requests that wait, and end.

        Batches that were sent are answered if they end within ``timeout`` seconds; else their requests are refused.
        """
        for slot in self._slots.values():
            slot.end()
        self._refuse_all(waiting_only=True)
        tasks = {task for slot in self._slots.values() for task in slot.tasks}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
            late = {task for slot in self._slots.values() for task in slot.tasks if not task.done()}
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._refuse_all(waiting_only=False)

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # The scheduler.

    def tell(self, event: Event | None = None) -> None:
        """Let the scheduler handle what was due before the event, the event, and what it makes due at once.

        None: the timer has woken. Nothing happens if the server is closed. Raises ServeError if the event cannot be.
        Nothing has happened then.
        """
        if self.closed:
            return
        now, wrong = time.monotonic(), None
        late = now - self._sleeps_until
        if late > STALL_S:  # The loop has stood still: devices have answered and nobody has heard it.
            self._stalled, self._sleeps_until = (now, late), now
        if event is None:
            self._timer, self._sleeps_until = None, math.inf
        try:
            if late > STALL_S:
                self._carry_out(StoodStill(late), now)
            self._catch_up(now)
            if event is not None:
                try:
                    self._carry_out(event, now)
                except ServeError as error:
                    wrong = error
                self._catch_up(now)
        except Exception:
            logger.exception("The scheduler has failed; the server is closed")
            self._refuse_all(waiting_only=False)
        # Wake when the scheduler wants it, and often enough to see a stall. A timer that wakes sooner stays.
        now = time.monotonic()
        wake = min(self._wake, now + STALL_S) if self._open else self._wake
        if wake < self._sleeps_until and not self.closed:
            if self._timer is not None:
                self._timer.cancel()
            self._sleeps_until = wake
            self._timer = self._loop.call_later(max(0.0, wake - now), self.tell)
        if wrong is not None:
            raise wrong

    def _catch_up(self, now: float) -> None:
        while self._wake <= now and not self.closed:
            due, self._wake = self._wake, math.inf
            moment = told_moment(due, now, self._jitter)
            self._carry_out(Tick(), moment)
            if self._wake <= moment:
                self._wake = moment + SAME_MOMENT_S  # So that the clock goes on, whatever the scheduler wants.

    def _carry_out(self, event: Event, now: float) -> None:
        lost: list[Event] = []
        for instruction in self._scheduler.handle(event, now):
            if isinstance(instruction, WakeAt):
                self._wake = instruction.at
            elif isinstance(instruction, Dispatch):
                answers = [self._open[one.id] for one in instruction.requests if one.id in self._open]
                for answer in answers:
                    answer.sent = True
                self._slots[instruction.gpu].put(instruction, answers)
            elif isinstance(instruction, Refuse):
                self._refuse(instruction.request.id, instruction.reason)
            elif isinstance(instruction, ModelGone):
                del self._models[instruction.model]
                self._going.pop(instruction.model).set_result(None)
            elif isinstance(instruction, Suspect):
                logger.warning("Device %d does not answer; its batch is given up", instruction.gpu)
                lost.append(self._slots[instruction.gpu].lose())  # It joins again when its batch returns.
        for one in lost:  # Not before the latest WakeAt, which may be another one after it.
            self._carry_out(one, now)

    def _refuse(self, number: int, reason: Reason) -> None:
        answer = self._open.pop(number, None)
        if answer is None:
            return
        if answer.sent and reason not in MAY_HAVE_RUN:
            # Whoever asks again must know that a model may have seen it.
            reason = Reason.CUT_OFF if reason is Reason.CLOSED else Reason.GPU_LOST
        answer.set_exception(Refused(answer.model, reason))

    def _refuse_all(self, waiting_only: bool) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for number, answer in list(self._open.items()):
            if not (waiting_only and answer.sent):
                self._refuse(number, Reason.CLOSED)
        while self._going:
            self._going.popitem()[1].set_result(None)

    # What the task of a device tells.

    def ended(self, slot: Slot, sent: Sent, outputs: Sequence[Any], error: Exception | None, waited: float) -> None:
        """A batch has run, after it had ``waited`` for its turn. error: that all of its requests get."""
        batch, answers = sent.batch, sent.answers
        seconds = time.monotonic() - sent.at - waited
        if batch.token == slot.token:
            for answer, output in zip(answers, outputs, strict=True):
                if self._open.pop(answer.number, None) is not None:
                    answer.set_result(output) if error is None else answer.set_exception(error)
            self.tell(BatchDone(batch.gpu, batch.token, batch.plan))
        else:
            slot.join_again()
        stalled = self._stalled[1] if self._stalled[0] >= sent.at else 0.0
        if error is None and answers and stalled <= STALLED * seconds:
            # What a batch waits within a pipeline was foreseen.
            self.tell(BatchTook(batch.model, batch.requests, seconds, waited if self._depth == 1 else 0.0))
        if self._watch is not None and answers:
            began = sent.at + waited
            queueing = sum([began - request.arrival for request in batch.requests])
            overlap = min(batch.overlap, seconds)
            self._watch(BatchSeen(slot.number, batch.model, len(answers), began, seconds, queueing, overlap))

    def gone(self, slot: Slot) -> None:
        """The device has left, or the server is closed, and all that was sent has run."""
        if not self.closed:
            del self._slots[slot.number]
            self._left[slot.number] = slot.token
            self.tell(GpuLost(slot.number))


def told_moment(due: float, now: float, jitter: float) -> float:
    """The moment that the scheduler is told for something that was due at ``due``, when ``now`` has come.

    The loop wakes a little late. The margin of a batch has ``jitter`` seconds for that. So what is late by less is told
    with its own moment; else a batch that was to start at its latest start would be too late each time.
    """
    return max(due, now - jitter)
