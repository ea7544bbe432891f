"""The server of one event loop: carries out the scheduler's instructions on the real clock. All times are seconds.

A request passes through `ask`, the scheduler, and the task of a device, which awaits the device with the inputs of a
batch. All of it runs on one event loop, so that nothing needs a lock; `call_later` keeps the time. No code of a user
runs on the loop.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from symphony_serve.backlog import Backlog
from symphony_serve.errors import DeviceLost, Refused, ServeError
from symphony_serve.messages import (
    MAY_HAVE_RUN,
    SAME_MOMENT_S,
    BatchDone,
    BatchPassed,
    BatchTook,
    Cancelled,
    Dispatch,
    Event,
    GpuHolds,
    GpuJoined,
    GpuLeaving,
    GpuLost,
    ModelAdded,
    ModelGone,
    ModelRemoved,
    Reason,
    Refuse,
    Request,
    RequestArrived,
    Server,
    StoodStill,
    Suspect,
    Tick,
    WakeAt,
)
from symphony_serve.model_side import Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.shell.device import Device, as_waited

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
#: A device that had no batch for this many seconds is looked at, by one call.
IDLE_S = 1.0


class Answer(asyncio.Future):
    """What becomes of a request: the model's output, the error that its function raised, or `Refused`.

    `cancel` takes the request out of its queue. If its batch was sent, the batch runs, and its output is dropped.
    """

    def __init__(self, server: AsyncServer, model: str, number: int, value: Any):
        super().__init__()
        self.server, self.model, self.number, self.value = server, model, number, value
        #: Whether its batch was sent once, and whether a device was lost that ran it.
        self.sent = self.lost = False

    def cancel(self, msg: Any | None = None) -> bool:
        """Do not want the answer any more. False: it is there."""
        cancelled = super().cancel(msg)
        if cancelled:
            self.server._forget(self)
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


class _Slot:
    """A device in the server. token: the scheduler's name for the time since it last joined.

    models: it gets batches of these; None: of all. leaves, lost: the scheduler gives it no batch, for ever, or until it
    joins again. ended: nothing more is to come.
    """

    def __init__(self, number: int, device: Device, token: int, models: frozenset[str] | None):
        self.number, self.device, self.token, self.models = number, device, token, models
        self.leaves = self.lost = self.ended = False
        #: What was sent and is not run yet: batches, their answers, and when they were sent.
        self.batches: deque[tuple[Dispatch, list[Answer], float]] = deque()
        self.wakes = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        #: By token and plan, the answers of the batches that it runs: one, or several in a pipeline of stages.
        self.running: dict[tuple[int, int], list[Answer]] = {}
        #: The tasks of a pipeline's batches.
        self.works: set[asyncio.Task[None]] = set()
        #: Whether somebody waits until it is there again.
        self.awaited = False

    def put(self, batch: Dispatch, answers: list[Answer]) -> None:
        self.batches.append((batch, answers, time.monotonic()))
        self.wakes.set()

    def runs(self, token: int) -> list[Answer]:
        """The answers of the batches under this token that it runs."""
        return [answer for (ours, _), answers in self.running.items() if ours == token for answer in answers]

    def end(self) -> None:
        """Its task ends when it has run what was sent to it."""
        self.ended = True
        self.wakes.set()


class AsyncServer:
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
    each batch after its requests were answered. A device that had no batch for `IDLE_S` is asked `Device.check`.
    Devices come and go by `join` and `leave`, models by `add` and `remove`. Use it as an async context manager, or
    `close` it. It belongs to the event loop that runs when it is made. Raises ServeError if a device lacks a model that
    it is to have.

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
        self._slos = {model.name: model.slo for model in models}
        numbered = dict(devices if isinstance(devices, Mapping) else enumerate(devices))
        held = held or {}
        for number, device in numbered.items():
            self._check(number, device, held.get(number))
        self._loop = asyncio.get_running_loop()
        self._watch = watch
        self._scheduler = self._decides(models)
        #: By model, its profile as it was known after the last batch.
        self._profiles = {model.name: model.profile for model in models}
        self._delays = models[0].delays
        self._jitter = max(model.delays.jitter for model in models)
        #: How many batches a device can run at once: more than one if it is a pipeline of stages.
        self._depth = max(model.profile.depth for model in models)
        #: When the scheduler wants to be woken, and when the timer will.
        self._wake = self._sleeps_until = math.inf
        self._timer: asyncio.TimerHandle | None = None
        #: When the loop was last seen to have stood still, and for how many seconds at the least.
        self._stalled = -math.inf, 0.0
        self._numbers = itertools.count()
        #: By number, what is neither answered nor refused.
        self._open: dict[int, Answer] = {}
        self._budgets = {model.name: model.budget for model in models}
        self._backlog = Backlog(self._profiles, self._budgets)
        self._closed = False
        #: By number, the devices that are there; and of each that has left, its last token.
        self._slots: dict[int, _Slot] = {}
        self._left: dict[int, int] = {}
        #: By name, the models that were removed and still have requests.
        self._going: dict[str, asyncio.Future[None]] = {}
        for number, device in numbered.items():
            self._join(number, device, held.get(number))

    def _check(self, number: int, device: Device, held: frozenset[str] | None) -> None:
        wanted = self._slos.keys() if held is None else held
        if not device.models >= wanted:
            said = f"device {number} has the models {sorted(device.models)}, expected {sorted(wanted)}"
            raise ServeError(f"{said}: every device has each model" if held is None else said)

    def _decides(self, models: Sequence[Model]) -> Server:
        """What decides; benchmarks put a baseline here."""
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
        self._backlog.waits(model)
        if self._closed:
            self._refuse(number, Reason.CLOSED)
        else:
            deadline = arrival + min(within, self._slos.get(model, 0.0))
            try:
                self._handle(RequestArrived(Request(number, model, arrival, deadline, source)))
            except ServeError:
                self._drop(number)
                raise
        return answer

    def hopeless(self, model: str, within: float = math.inf, count: int = 1) -> Reason | None:
        """Why a request that comes now is certain to be refused: a batch of 1, or what waits before it, takes too long.

        Or no such model is served. Who asks this first need not read a request that is refused. See `backlog`.
        within: as for `ask`. count: requests that come now, of which one at least is certain to be refused.
        """
        if self._closed:
            return None  # `ask` says why.
        if model not in self._slos or model in self._going:
            return Reason.UNKNOWN_MODEL
        there = self._with(model)
        if not there:
            return None  # `ask` waits for a device.
        left = self._budgets[model] - max(0.0, self._slos[model] - within)
        if self._backlog.alone[model] > left:
            return Reason.LATE_ON_ARRIVAL
        seconds = self._backlog.seconds(model, there, time.monotonic(), count)
        return Reason.QUEUE_FULL if seconds > left else None

    def wait(self, model: str) -> float:
        """Seconds at the least until a request to ``model`` that came now would be answered; its SLO if none can be.

        0 if no such model is served: the request would be refused at once.
        """
        if model not in self._slos:
            return 0.0
        return min(self._slos[model], self._backlog.seconds(model, self._with(model), time.monotonic()))

    def _with(self, model: str) -> list[int]:
        """The devices that stay and have the model; one that is lost is taken to come back."""
        slots = self._slots.values()
        return [slot.number for slot in slots if not slot.leaves and (slot.models is None or model in slot.models)]

    def join(self, number: int, device: Device, held: frozenset[str] | None = None) -> None:
        """A device comes, with all models or with those that it holds. Its batches are taken to take the known times.

        Raises ServeError if a device of that number is there, also one that leaves and still has a batch, or if it
        lacks a model that it is to have.
        """
        self._check(number, device, held)
        if number in self._slots:
            raise ServeError(f"device {number} is there already; let it leave first")
        self._join(number, device, held)

    def _join(self, number: int, device: Device, held: frozenset[str] | None) -> None:
        slot = self._slots[number] = _Slot(number, device, self._left.pop(number, 0) + 1, held)
        if not self._closed:
            slot.task = self._loop.create_task(self._serve(slot), name=f"serve-device-{number}")
            self._handle(GpuJoined(number, slot.token, models=held))

    def busy_with(self, number: int, model: str) -> bool:
        """Whether a batch of the model was sent to the device, and not all of it is answered."""
        slot = self._slots[number]
        sent = [one.model for _, answers, _ in slot.batches for one in answers]
        runs = [one.model for answers in slot.running.values() for one in answers if not one.done()]
        return model in (*sent, *runs)

    def hold(self, number: int, models: frozenset[str]) -> None:
        """The device gets batches of these models from now on, and of no other one. What was sent to it stays."""
        slot = self._slots.get(number)
        if slot is not None and not self._closed:
            slot.models = models
            self._handle(GpuHolds(number, models))

    def leave(self, number: int) -> None:
        """A device goes: it gets no batch any more, and answers what was sent to it. `devices` says when it has gone.

        Nothing happens if there is no device of that number.
        """
        slot = self._slots.get(number)
        if slot is not None and not slot.leaves and not self._closed:
            slot.leaves = True
            self._handle(GpuLeaving(number))
            slot.end()

    def add(self, model: Model) -> None:
        """One more model takes requests. Its delays are those of the models that are there: all have one event loop.

        Raises ServeError if a device that has all models lacks it, if one of its name is there, or if a batch of 1 with
        these delays takes longer than its SLO.
        """
        model = replace(model, delays=self._delays)
        if model.name in self._slos:
            raise ServeError(f"model {model.name} is served already, expected another name")
        all_have = [slot for slot in self._slots.values() if slot.models is None]
        lacking = sorted(slot.number for slot in all_have if model.name not in slot.device.models)
        if lacking:
            raise ServeError(f"device {lacking[0]} has not the model {model.name}: every device has each model")
        self._handle(ModelAdded(model))
        self._slos[model.name], self._budgets[model.name] = model.slo, model.budget
        self._profiles[model.name] = model.profile
        self._backlog.add(model.name, model.profile, model.budget)

    async def remove(self, model: str) -> None:
        """A model takes no request any more. Returns when those that it has are answered or refused.

        Raises ServeError if no model of that name is served.
        """
        if self._closed:
            return
        self._check_served(model)
        gone = self._going.get(model)
        if gone is None:
            gone = self._going[model] = self._loop.create_future()
            self._handle(ModelRemoved(model))
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
        return any(not self._slots[number].lost for number in self._with(model))

    def serves(self, model: str) -> bool:
        """Whether a model of that name is served, or was until the last of its requests is answered."""
        return model in self._slos

    def profile(self, model: str) -> Profile:
        """The model's profile as it is known now. Raises ServeError if no model of that name is served."""
        self._check_served(model)
        return self._profiles[model]

    def batching(self, model: str) -> str:
        """The former that has the model's requests now: "window" or "orloj".

        Raises ServeError if no model of that name is served.
        """
        self._check_served(model)
        return self._scheduler.batching(model).value if isinstance(self._scheduler, Scheduler) else "window"

    def _check_served(self, model: str) -> None:
        if model not in self._slos:
            raise ServeError(f"no model {model} is served, expected one of {', '.join(sorted(self._slos))}")

    @property
    def unanswered(self) -> int:
        """How many requests are neither answered nor refused."""
        return len(self._open)

    @property
    def closed(self) -> bool:
        """Whether all requests are refused: after `close`, or because the scheduler has failed."""
        return self._closed

    async def close(self, timeout: float = 10.0) -> None:
        """Refuse all requests that wait, and end.

        Batches that were sent are answered if they end within ``timeout`` seconds; else their requests are refused.
        """
        for slot in self._slots.values():
            slot.end()
        self._refuse_all(waiting_only=True)
        tasks = [slot.task for slot in self._slots.values() if slot.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout)
            late |= {work for slot in self._slots.values() for work in slot.works}
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._refuse_all(waiting_only=False)

    async def __aenter__(self) -> AsyncServer:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # The scheduler.

    def _handle(self, event: Event) -> None:
        """Let the scheduler handle what was due before the event, the event, and what it makes due at once.

        Raises ServeError if the event cannot be. Nothing has happened then.
        """
        now, wrong = time.monotonic(), None
        try:
            self._catch_up(now)
            try:
                self._carry_out(event, now)
            except ServeError as error:
                wrong = error
            self._catch_up(now)
        except Exception:
            logger.exception("The scheduler has failed; the server is closed")
            self._refuse_all(waiting_only=False)
        self._set_timer()
        if wrong is not None:
            raise wrong

    def _note_stall(self, now: float) -> None:
        """If the loop has stood still, devices have answered and nobody has heard it."""
        late = now - self._sleeps_until
        if late > STALL_S and not self._closed:
            self._stalled, self._sleeps_until = (now, late), now
            self._carry_out(StoodStill(late), now)

    def _catch_up(self, now: float) -> None:
        self._note_stall(now)
        while self._wake <= now and not self._closed:
            due, self._wake = self._wake, math.inf
            moment = told_moment(due, now, self._jitter)
            self._carry_out(Tick(), moment)
            if self._wake <= moment:
                self._wake = moment + SAME_MOMENT_S  # So that the clock goes on, whatever the scheduler wants.

    def _carry_out(self, event: Event, now: float) -> None:
        for instruction in self._scheduler.handle(event, now):
            if isinstance(instruction, WakeAt):
                self._wake = instruction.at
            elif isinstance(instruction, Dispatch):
                self._send(instruction)
            elif isinstance(instruction, Refuse):
                self._refuse(instruction.request.id, instruction.reason)
            elif isinstance(instruction, ModelGone):
                self._forget_model(instruction.model)
            elif isinstance(instruction, Suspect):
                slot = self._slots[instruction.gpu]
                slot.token += 1  # It joins again when its batch returns.
                slot.lost = True
                logger.warning("Device %d does not answer; its batch is given up", slot.number)
                for answer in _lost_again(slot.runs(instruction.token)):
                    self._refuse(answer.number, Reason.LOST_TWICE)

    def _set_timer(self) -> None:
        """Wake when the scheduler wants it, and often enough to see a stall. A timer that wakes sooner stays."""
        now = time.monotonic()
        wake = min(self._wake, now + STALL_S) if self._open else self._wake
        if wake < self._sleeps_until and not self._closed:
            if self._timer is not None:
                self._timer.cancel()
            self._sleeps_until = wake
            self._timer = self._loop.call_later(max(0.0, wake - now), self._due)

    def _due(self) -> None:
        self._timer, now = None, time.monotonic()
        try:
            self._note_stall(now)
            self._sleeps_until = math.inf
            self._catch_up(now)
        except Exception:
            logger.exception("The scheduler has failed; the server is closed")
            self._refuse_all(waiting_only=False)
        self._set_timer()

    def _send(self, batch: Dispatch) -> None:
        answers = []
        for request in batch.requests:
            answer = self._open.get(request.id)
            if answer is not None:
                if not answer.sent:
                    self._backlog.waits_no_more(batch.model)
                answer.sent = True
                answers.append(answer)
        self._backlog.sent(batch.gpu, batch.start + batch.seconds - batch.overlap)
        self._slots[batch.gpu].put(batch, answers)

    def _refuse(self, number: int, reason: Reason) -> None:
        answer = self._drop(number)
        if answer is None:
            return
        if answer.sent and reason not in MAY_HAVE_RUN:
            # Whoever asks again must know that a model may have seen it.
            reason = Reason.CUT_OFF if reason is Reason.CLOSED else Reason.GPU_LOST
        answer.set_exception(Refused(answer.model, reason))

    def _drop(self, number: int) -> Answer | None:
        """The request is answered, refused or cancelled. None: it was so already."""
        answer = self._open.pop(number, None)
        if answer is not None and not answer.sent:
            self._backlog.waits_no_more(answer.model)
        return answer

    def _refuse_all(self, waiting_only: bool) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for number, answer in list(self._open.items()):
            if not (waiting_only and answer.sent):
                self._refuse(number, Reason.CLOSED)
        for model in list(self._going):
            self._forget_model(model)

    def _forget_model(self, model: str) -> None:
        """The model has no request any more, or all are refused."""
        self._backlog.remove(model)
        del self._slos[model], self._budgets[model], self._profiles[model]
        gone = self._going.pop(model)
        if not gone.done():
            gone.set_result(None)

    def _forget(self, answer: Answer) -> None:
        """The answer was cancelled."""
        self._drop(answer.number)
        if not self._closed:
            self._handle(Cancelled(answer.model, answer.number))

    # A device.

    async def _serve(self, slot: _Slot) -> None:
        """The task of a device."""
        while True:
            if not slot.batches and not slot.ended:
                slot.wakes.clear()
                try:
                    await asyncio.wait_for(slot.wakes.wait(), IDLE_S)
                except asyncio.TimeoutError:
                    if not slot.works:
                        await self._look_at(slot)
                continue
            if not slot.batches:
                if slot.works:
                    await asyncio.wait(slot.works)
                self._gone(slot)
                return
            work = self._try(slot, *slot.batches.popleft())
            if self._depth == 1:
                await work
            else:
                task = self._loop.create_task(work, name=f"serve-batch-{slot.number}")
                slot.works.add(task)
                task.add_done_callback(slot.works.discard)

    async def _try(self, slot: _Slot, batch: Dispatch, answers: list[Answer], sent: float) -> None:
        slot.running[batch.token, batch.plan] = answers
        try:
            await self._work(slot, batch, answers, sent)
        except Exception:
            logger.exception("The task of device %d has failed; it begins anew", slot.number)
            self._lose(slot, answers)
        finally:
            slot.running.pop((batch.token, batch.plan), None)

    async def _look_at(self, slot: _Slot) -> None:
        """The device is idle: is it there?"""
        token = slot.token
        try:
            await slot.device.check()
        except DeviceLost as lost:
            await self._wait_for(slot, token, [], lost)
        except Exception:
            logger.exception("A look at device %d has failed", slot.number)
        if slot.lost:  # A batch was sent meanwhile, and given up.
            self._join_again(slot)

    def _join_again(self, slot: _Slot) -> None:
        if not self._closed and not slot.leaves:
            slot.lost = False
            self._handle(GpuJoined(slot.number, slot.token, models=slot.models))

    def _gone(self, slot: _Slot) -> None:
        """The device has left, or the server is closed."""
        if not self._closed:
            del self._slots[slot.number]
            self._left[slot.number] = slot.token
            self._handle(GpuLost(slot.number))  # What was sent to it since then goes to another one.

    async def _work(self, slot: _Slot, batch: Dispatch, answers: list[Answer], sent: float) -> None:
        if batch.token != slot.token:
            return  # It was sent behind one that took too long, and given up with it.
        try:
            passed = None if self._depth == 1 else functools.partial(self._passed, slot, batch)
            outputs, error, waited = await _call(slot.device, batch.model, answers, passed)
        except DeviceLost as lost:
            await self._wait_for(slot, batch.token, answers, lost)
            return
        now = time.monotonic()
        seconds = now - sent - waited
        self._note_stall(now)
        stalled = self._stalled[1] if self._stalled[0] >= sent else 0.0
        if batch.token == slot.token:
            for answer, output in zip(answers, outputs, strict=True):
                if self._drop(answer.number) is not None:
                    answer.set_result(output) if error is None else answer.set_exception(error)
            self._backlog.done(slot.number)
            if not self._closed:
                self._handle(BatchDone(batch.gpu, batch.token, batch.plan))
        else:
            self._join_again(slot)
        if error is None and answers and not self._closed and stalled <= STALLED * seconds:
            self._learn(batch, seconds, waited)
        if self._watch is not None and answers:
            sent += waited
            queueing = sum([sent - request.arrival for request in batch.requests])
            overlap = min(batch.overlap, seconds)
            self._watch(BatchSeen(slot.number, batch.model, len(answers), sent, seconds, queueing, overlap))

    def _passed(self, slot: _Slot, batch: Dispatch) -> None:
        """The batch has left the first stage of a pipeline."""
        if batch.token == slot.token and not self._closed:
            self._backlog.done(slot.number)
            self._handle(BatchPassed(batch.gpu, batch.token, batch.plan))

    async def _wait_for(self, slot: _Slot, token: int, answers: list[Answer], lost: DeviceLost) -> None:
        """The device is gone with a batch of this token: give its requests back, and wait until it is there again.

        The batches that a pipeline has in other stages are gone with it.
        """
        ours = token == slot.token  # Else it was suspect, or gone with another batch, and this one is given up already.
        if ours and self._depth > 1:
            answers = slot.runs(token)
        logger.warning("Device %d is lost (%s); its batch of %d requests is given up", slot.number, lost, len(answers))
        again = [] if not ours else list(answers) if self._closed else _lost_again(answers)
        for answer in again:
            self._refuse(answer.number, Reason.CLOSED if self._closed else Reason.LOST_TWICE)
        if ours and not self._closed:
            slot.token += 1
            slot.lost = True
            self._handle(GpuLost(slot.number))
        for answer in answers:
            if answer.done():  # The scheduler has put it back into its queue.
                self._handle(Cancelled(answer.model, answer.number))
        if slot.awaited:
            return
        slot.awaited = True
        try:
            while not self._closed and not slot.leaves and not await lost.back():
                pass
        finally:
            slot.awaited = False
        self._join_again(slot)

    def _learn(self, batch: Dispatch, seconds: float, waited: float) -> None:
        """A batch that has run says how long the next ones take."""
        waited = waited if self._depth == 1 else 0.0  # What a batch waits within a pipeline was foreseen.
        self._handle(BatchTook(batch.model, batch.requests, seconds, waited))
        if isinstance(self._scheduler, Scheduler) and batch.model in self._profiles:
            profile = self._scheduler.profile(batch.model)
            if profile is not self._profiles[batch.model]:
                self._profiles[batch.model] = profile
                self._backlog.set_profile(batch.model, self._scheduler.usual(batch.model))

    def _lose(self, slot: _Slot, answers: list[Answer]) -> None:
        if not self._closed:
            slot.token += 1
            self._handle(GpuLost(slot.number))
            self._join_again(slot)
        else:
            for answer in answers:
                self._refuse(answer.number, Reason.CLOSED)


def _lost_again(answers: list[Answer]) -> list[Answer]:
    """Record that a device was lost that ran these. Returns those that had lost one before."""
    again = [answer for answer in answers if answer.lost]
    for answer in answers:
        answer.lost = True
    return again


def told_moment(due: float, now: float, jitter: float) -> float:
    """The moment that the scheduler is told for something that was due at ``due``, when ``now`` has come.

    The loop wakes a little late. The margin of a batch has ``jitter`` seconds for that. So what is late by less is told
    with its own moment; else a batch that was to start at its latest start would be too late each time.
    """
    return max(due, now - jitter)


async def _call(
    device: Device, model: str, answers: list[Answer], passed: Callable[[], None] | None
) -> tuple[Sequence[Any], Exception | None, float]:
    """The outputs for the answers, or the error that all of them get; and the seconds of waiting for its turn."""
    nothing = [None] * len(answers)
    if not answers:
        return nothing, None, 0.0  # All were cancelled while the batch was on its way.
    try:
        inputs = [answer.value for answer in answers]
        found, waited = as_waited(await (device.run(model, inputs, passed) if passed else device.run(model, inputs)))
        outputs = list(found)
    except DeviceLost:
        raise
    except Exception as error:
        return nothing, error, 0.0
    if len(outputs) != len(answers):
        said = f"the function of model {model} returned {len(outputs)} outputs for {len(answers)} inputs"
        return nothing, ServeError(f"{said}; return as many"), waited
    return outputs, None, waited
