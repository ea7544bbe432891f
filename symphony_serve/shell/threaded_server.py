"""The server of one process: carries out the scheduler's instructions on the real clock. All times are seconds.

A request passes through `submit` (in the caller's thread), the scheduler, and the thread of a device, which calls the
model's function with the inputs of a batch. The first thread that enters the server carries out what is due: a caller,
a device's thread that has finished a batch, or the thread that keeps the time. The scheduler is never entered by two
threads at once, and no code of a user runs while it is entered.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from symphony_serve.backlog import Backlog
from symphony_serve.errors import DeviceLost, Refused, ServeError
from symphony_serve.messages import (
    SAME_MOMENT_S,
    BatchDone,
    Cancelled,
    Dispatch,
    Event,
    GpuJoined,
    GpuLeaving,
    GpuLost,
    ProfileChanged,
    Reason,
    Refuse,
    Request,
    RequestArrived,
    Server,
    Suspect,
    Tick,
    WakeAt,
)
from symphony_serve.model_side import Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.seen_times import SeenTimes

logger = logging.getLogger(__name__)


class Waited(NamedTuple):
    """The outputs of a batch that has waited ``seconds`` for its turn, on a device that others use as well."""

    outputs: Sequence[Any]
    seconds: float


#: A model on one device: takes a list of inputs, and returns an output for each. On a GPU it waits for them.
Function = Callable[[list[Any]], Sequence[Any] | Waited]

#: A batch that was not answered this many seconds after it was sent makes its device suspect, if it also took three
#: times its time: a loaded machine, or Python's garbage collector, lets threads stand still for some 100 ms.
LEAST_PATIENCE_S = 1.0
#: A device that had no batch for this many seconds is looked at, by one call.
IDLE_S = 1.0
#: A model is tried as long as a batch of 1 is said to take this part of its SLO, delays apart. The rest is
#: the time from a request's arrival to a decision about it.
TRIED = 0.9


class Answer(Future):
    """What becomes of a request: the model's output, the error that its function raised, or `Refused`.

    `cancel` works until the batch is sent. A callback of `add_done_callback` runs in a thread of the server, as in
    `concurrent.futures`, and so it must be short.
    """

    def __init__(self, server: ThreadedServer, model: str, number: int, value: Any):
        super().__init__()
        self._server, self._model, self._number = server, model, number
        self._value = value
        #: Whether its batch was sent once, and whether a device was lost that ran it.
        self._sent = self._lost = False

    def cancel(self) -> bool:
        """Take the request out of its queue. False: its batch was sent, or it is answered."""
        cancelled = super().cancel()
        if cancelled:
            self._server._forget(self)
        return cancelled


#: An answer, and what it is told: the output, or an exception that is raised where the result is asked for.
_Told = list[tuple[Answer, Any, BaseException | None]]


class BatchSeen(NamedTuple):
    """A batch that a device has run.

    sent: when it was sent, or had its turn, on `time.monotonic`. seconds: from then until its outputs were there.
    waited: the seconds from the arrivals of its requests until ``sent``, added up.
    """

    device: int
    model: str
    size: int
    sent: float
    seconds: float
    waited: float


class _Device:
    """A device's thread. token: the scheduler's name for the time since it last joined. leaves: it gets no batch.

    lost: the scheduler gives it no batch either, until it joins again.
    """

    def __init__(self, number: int, functions: Mapping[str, Function], token: int):
        self.number, self.functions, self.token = number, functions, token
        self.leaves = self.lost = False
        #: (batch, its answers, when it was sent); None: end.
        self.batches: SimpleQueue[tuple[Dispatch, list[Answer], float] | None] = SimpleQueue()
        self.thread: threading.Thread | None = None
        #: The answers of the batch that it runs.
        self.running: list[Answer] = []


class ThreadedServer:
    """Answers requests to ``models``, each before its deadline, or refuses them.

    models: with profiles and delays, mostly from `measuring.measure_models`. Their jitter is what a thread may wake
        too late; with less, a batch that is deferred to its latest start is given up. devices: for each device the
        function of every model; a mapping names them by number, as `join` does. A function is called by the thread of
        its device only.

    Each request is answered or refused exactly once. What waits is refused before its deadline, so that no queue is
    longer than what comes within an SLO. An answer is late if its batch takes longer than any of the latest ones. A
    batch that takes three times its time, and `LEAST_PATIENCE_S`, is given up: its device is lost until the function
    returns. A function that raises is its batch's answer: each of the requests gets the error. A function that raises
    `DeviceLost` has lost its device until the error's ``back`` returns True. The batch's requests go to another device,
    or are refused; one that has lost two devices is refused. ``watch`` is called with each batch, by the thread of its
    device after its requests were answered. ``idle`` is called with the number of a device that had no batch for
    `IDLE_S`, by its thread; it may raise `DeviceLost`. Devices come and go by `join` and `leave`. Use it as a context
    manager, or `close` it. Raises ServeError if a device lacks a model, or has one that is not in ``models``.

    One thing: callers, the thread of the time and those of the devices share the scheduler and one lock.
    """

    def __init__(
        self,
        models: Sequence[Model],
        devices: Sequence[Mapping[str, Function]] | Mapping[int, Mapping[str, Function]],
        watch: Callable[[BatchSeen], None] | None = None,
        idle: Callable[[int], None] | None = None,
    ):
        if not devices:
            raise ServeError("there are 0 devices, expected one mapping from model to function for each device")
        self._slos = {model.name: model.slo for model in models}
        numbered = dict(devices if isinstance(devices, Mapping) else enumerate(devices))
        for number, functions in numbered.items():
            self._check(number, functions)
        self._watch, self._idle = watch, idle
        self._scheduler = self._decides(models)
        self._seen = {one.name: SeenTimes(one.profile, TRIED * one.budget) for one in models}
        self._jitter = max(model.delays.jitter for model in models)
        self._lock = threading.Lock()
        #: Told when the scheduler wants to be woken sooner than its thread will be.
        self._sooner = threading.Condition(self._lock)
        self._wake = self._sleeps_until = math.inf
        self._numbers = itertools.count()
        #: By number, what is neither answered nor refused.
        self._open: dict[int, Answer] = {}
        self._budgets = {model.name: model.budget for model in models}
        self._backlog = Backlog({model.name: model.profile for model in models}, self._budgets)
        self._closed = False
        #: By number, the devices whose threads live; and of each that has left, its last token.
        self._devices: dict[int, _Device] = {}
        self._left: dict[int, int] = {}
        for number, functions in numbered.items():
            self.join(number, functions)
        self._time_thread = self._start(self._keep_time, "serve-time")

    def _check(self, number: int, functions: Mapping[str, Function]) -> None:
        if functions.keys() != self._slos.keys():
            raise ServeError(
                f"device {number} has the models {sorted(functions)}, expected {sorted(self._slos)}: "
                "every device has a function for each model"
            )

    def _decides(self, models: Sequence[Model]) -> Server:
        """What decides; benchmarks put a baseline here."""
        return Scheduler(models, least_patience=LEAST_PATIENCE_S)

    @staticmethod
    def _start(run: Callable[[], None], name: str) -> threading.Thread:
        """A daemon, so that a function that never returns does not keep the process from ending."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    # What users call.

    def submit(self, model: str, value: Any, within: float = math.inf) -> Answer:
        """Ask ``model`` about one input. Never waits; nothing is raised, what is refused is told by the answer.

        within: seconds that are left for the request, if fewer than the model's SLO; the others were spent elsewhere.
        """
        arrival = time.monotonic()
        told: _Told = []
        with self._lock:
            number = next(self._numbers)
            answer = self._open[number] = Answer(self, model, number, value)
            self._backlog.waits(model)
            if self._closed:
                self._refuse(number, Reason.CLOSED, told)
            else:
                deadline = arrival + min(within, self._slos.get(model, 0.0))
                self._handle(RequestArrived(Request(number, model, arrival, deadline)), told)
        _tell(told)
        return answer

    def hopeless(self, model: str, within: float = math.inf) -> bool:
        """Whether a request to ``model`` that came now would not be answered, because of what waits before it.

        within: as for `submit`. Who asks this first need not read a request that is refused. See `backlog`.
        """
        with self._lock:
            there = [device.number for device in self._devices.values() if not device.leaves]
            if self._closed or not there:
                return False  # `submit` says why, or waits for a device.
            needed = self._backlog.seconds(model, there, time.monotonic())
        spent = max(0.0, self._slos[model] - within)
        return needed > self._budgets[model] - spent

    def join(self, number: int, functions: Mapping[str, Function]) -> None:
        """A device comes. Its batches are taken to take the times that are known.

        Raises ServeError if a device of that number is there, also one that leaves and still has a batch, or if it
        lacks a model.
        """
        self._check(number, functions)
        told: _Told = []
        with self._lock:
            if number in self._devices:
                raise ServeError(f"device {number} is there already; let it leave first")
            device = self._devices[number] = _Device(number, functions, self._left.pop(number, 0) + 1)
            if not self._closed:
                self._handle(GpuJoined(number, device.token), told)
                device.thread = self._start(partial(self._serve, device), f"serve-device-{number}")
        _tell(told)

    def leave(self, number: int) -> None:
        """A device goes: it gets no batch any more, and answers what was sent to it. `devices` says when it has gone.

        Nothing happens if there is no device of that number.
        """
        told: _Told = []
        with self._lock:
            device = self._devices.get(number)
            if device is not None and not device.leaves and not self._closed:
                device.leaves = True
                self._handle(GpuLeaving(number, time.monotonic()), told)
                device.batches.put(None)
        _tell(told)

    @property
    def devices(self) -> frozenset[int]:
        """The numbers of the devices that are there, with those that leave and still have a batch."""
        with self._lock:
            return frozenset(self._devices)

    @property
    def able(self) -> int:
        """How many devices can be given a batch: those that neither leave nor are lost."""
        with self._lock:
            return sum(not device.leaves and not device.lost for device in self._devices.values())

    def profile(self, model: str) -> Profile:
        """The model's profile as it is known now."""
        return self._seen[model].profile

    @property
    def unanswered(self) -> int:
        """How many requests are neither answered nor refused."""
        return len(self._open)

    @property
    def closed(self) -> bool:
        """Whether all requests are refused: after `close`, or because the scheduler has failed."""
        return self._closed

    def close(self, timeout: float = 10.0) -> None:
        """Refuse all requests that wait, and end.

        Batches that were sent are answered if they end within ``timeout`` seconds; else their requests are refused,
        and the thread of that device ends when its function returns.
        """
        until = time.monotonic() + timeout
        self._end(waiting_only=True)
        for thread in (self._time_thread, *(device.thread for device in list(self._devices.values()))):
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        self._end(waiting_only=False)

    def __enter__(self) -> ThreadedServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # The scheduler. All of these are called with the lock held.

    def _handle(self, event: Event, told: _Told) -> None:
        """Let the scheduler handle what was due before the event, the event, and what it makes due at once."""
        now = time.monotonic()
        try:
            self._catch_up(now, told)
            self._carry_out(event, now, told)
            self._catch_up(now, told)
        except Exception:
            logger.exception("The scheduler has failed; the server is closed")
            self._refuse_all(told, waiting_only=False)
        if self._wake < self._sleeps_until:
            self._sooner.notify()

    def _catch_up(self, now: float, told: _Told) -> None:
        while self._wake <= now and not self._closed:
            due, self._wake = self._wake, math.inf
            moment = told_moment(due, now, self._jitter)
            self._carry_out(Tick(), moment, told)
            if self._wake <= moment:
                self._wake = moment + SAME_MOMENT_S  # So that the clock goes on, whatever the scheduler wants.

    def _carry_out(self, event: Event, now: float, told: _Told) -> None:
        for instruction in self._scheduler.handle(event, now):
            if isinstance(instruction, WakeAt):
                self._wake = instruction.at
            elif isinstance(instruction, Dispatch):
                self._send(instruction)
            elif isinstance(instruction, Refuse):
                self._refuse(instruction.request.id, instruction.reason, told)
            elif isinstance(instruction, Suspect):
                device = self._devices[instruction.gpu]
                device.token += 1  # It joins again when its function returns.
                device.lost = True
                logger.warning("Device %d does not answer; its batch is given up", device.number)
                for answer in _lost_again(device.running):
                    self._refuse(answer._number, Reason.LOST_TWICE, told)

    def _send(self, batch: Dispatch) -> None:
        answers = []
        for request in batch.requests:
            answer = self._open.get(request.id)
            if answer is not None and (answer._sent or answer.set_running_or_notify_cancel()):
                if not answer._sent:
                    self._backlog.waits_no_more(batch.model)
                answer._sent = True
                answers.append(answer)
        self._backlog.sent(batch.gpu, batch.start + batch.seconds)
        self._devices[batch.gpu].batches.put((batch, answers, time.monotonic()))

    def _refuse(self, number: int, reason: Reason, told: _Told) -> None:
        answer = self._drop(number)
        if answer is not None:
            told.append((answer, None, Refused(answer._model, reason)))

    def _drop(self, number: int) -> Answer | None:
        """The request is answered, refused or cancelled. None: it was so already."""
        answer = self._open.pop(number, None)
        if answer is not None and not answer._sent:
            self._backlog.waits_no_more(answer._model)
        return answer

    def _refuse_all(self, told: _Told, waiting_only: bool) -> None:
        self._closed = True
        for number, answer in list(self._open.items()):
            if not (waiting_only and answer._sent):
                self._refuse(number, Reason.CLOSED, told)
        self._sooner.notify()

    # Without the lock.

    def _end(self, waiting_only: bool) -> None:
        told: _Told = []
        with self._lock:
            for device in self._devices.values() if waiting_only else ():
                device.batches.put(None)
            self._refuse_all(told, waiting_only)
        _tell(told)

    def _forget(self, answer: Answer) -> None:
        """The answer was cancelled before its batch was sent."""
        told: _Told = []
        with self._lock:
            if not self._closed:
                self._handle(Cancelled(answer._model, answer._number), told)
            self._drop(answer._number)
        _tell(told)

    def _keep_time(self) -> None:
        while True:
            told: _Told = []
            with self._lock:
                if self._closed:
                    return
                self._sleeps_until = self._wake
                left = self._wake - time.monotonic()
                if left > 0:
                    self._sooner.wait(min(left, threading.TIMEOUT_MAX))
                self._sleeps_until = -math.inf
                self._due(told)
            _tell(told)

    def _due(self, told: _Told) -> None:
        try:
            self._catch_up(time.monotonic(), told)
        except Exception:
            logger.exception("The scheduler has failed; the server is closed")
            self._refuse_all(told, waiting_only=False)

    def _serve(self, device: _Device) -> None:
        """A device's thread."""
        while True:
            try:
                item = device.batches.get(timeout=IDLE_S if self._idle is not None else None)
            except Empty:
                self._look_at(device)
                continue
            if item is None:
                self._gone(device)
                return
            try:
                self._work(device, *item)
            except BaseException:
                logger.exception("The thread of device %d has failed; it begins anew", device.number)
                self._lose(device, item[1])

    def _look_at(self, device: _Device) -> None:
        """The device is idle: is it there?"""
        token = device.token
        try:
            assert self._idle is not None
            self._idle(device.number)
        except DeviceLost as lost:
            self._wait_for(device, token, [], lost)
        except Exception:
            logger.exception("A look at device %d has failed", device.number)
        told: _Told = []
        with self._lock:
            if device.lost:  # A batch was sent meanwhile, and given up.
                self._join_again(device, told)
        _tell(told)

    def _join_again(self, device: _Device, told: _Told) -> None:
        """With the lock held."""
        if not self._closed and not device.leaves:
            device.lost = False
            self._handle(GpuJoined(device.number, device.token), told)

    def _gone(self, device: _Device) -> None:
        """The device has left, or the server is closed."""
        told: _Told = []
        with self._lock:
            if not self._closed:
                del self._devices[device.number]
                self._left[device.number] = device.token
                self._handle(GpuLost(device.number), told)  # What was sent to it since then goes to another one.
        _tell(told)

    def _work(self, device: _Device, batch: Dispatch, answers: list[Answer], sent: float) -> None:
        if batch.token != device.token:
            return  # It was sent behind one that took too long, and given up with it.
        device.running = answers
        try:
            outputs, error, waited = _call(device.functions[batch.model], batch.model, answers)
        except DeviceLost as lost:
            self._wait_for(device, batch.token, answers, lost)
            return
        told: _Told = []
        seconds = time.monotonic() - sent - waited
        with self._lock:
            if batch.token == device.token:
                for answer, output in zip(answers, outputs, strict=True):
                    if self._drop(answer._number) is not None:
                        told.append((answer, output, error))
                self._backlog.done(device.number)
                if not self._closed:
                    self._handle(BatchDone(batch.gpu, batch.token, batch.plan), told)
            else:
                self._join_again(device, told)
            if error is None and answers and not self._closed:
                self._correct(batch, seconds, waited, told)
        _tell(told)
        if self._watch is not None and answers:
            sent += waited
            queueing = sum(sent - request.arrival for request in batch.requests)
            self._watch(BatchSeen(device.number, batch.model, len(answers), sent, seconds, queueing))

    def _wait_for(self, device: _Device, token: int, answers: list[Answer], lost: DeviceLost) -> None:
        """The device is gone with a batch of this token: give its requests back, and wait until it is there again."""
        logger.warning(
            "Device %d is lost (%s); its batch of %d requests is given up", device.number, lost, len(answers)
        )
        told: _Told = []
        with self._lock:
            ours = token == device.token  # Else it was suspect, and its batch is given up already.
            again = [] if not ours else list(answers) if self._closed else _lost_again(answers)
            for answer in again:
                self._refuse(answer._number, Reason.CLOSED if self._closed else Reason.LOST_TWICE, told)
            if ours and not self._closed:
                device.token += 1
                device.lost = True
                self._handle(GpuLost(device.number), told)
            for answer in again:
                self._handle(Cancelled(answer._model, answer._number), told)
        _tell(told)
        while not self._closed and not device.leaves and not lost.back():
            pass
        told = []
        with self._lock:
            self._join_again(device, told)
        _tell(told)

    def _correct(self, batch: Dispatch, seconds: float, waited: float, told: _Told) -> None:
        profile = self._seen[batch.model].add(len(batch.requests), seconds, waited)
        if profile is not None:
            self._backlog.set_profile(batch.model, profile)
            self._handle(ProfileChanged(batch.model, profile), told)

    def _lose(self, device: _Device, answers: list[Answer]) -> None:
        told: _Told = []
        with self._lock:
            if not self._closed:
                device.token += 1
                self._handle(GpuLost(device.number), told)
                self._join_again(device, told)
            else:
                for answer in answers:
                    self._refuse(answer._number, Reason.CLOSED, told)
        _tell(told)


def _lost_again(answers: list[Answer]) -> list[Answer]:
    """Record that a device was lost that ran these. Returns those that had lost one before."""
    again = [answer for answer in answers if answer._lost]
    for answer in answers:
        answer._lost = True
    return again


def told_moment(due: float, now: float, jitter: float) -> float:
    """The moment that the scheduler is told for something that was due at ``due``, when ``now`` has come.

    A thread wakes a little late. The margin of a batch has ``jitter`` seconds for that. So what is late by less is told
    with its own moment; else a batch that was to start at its latest start would be too late each time.
    """
    return max(due, now - jitter)


def as_waited(returned: Sequence[Any] | Waited) -> Waited:
    """What a `Function` returned, with its seconds of waiting."""
    return returned if isinstance(returned, Waited) else Waited(returned, 0.0)


def _call(function: Function, model: str, answers: list[Answer]) -> tuple[Sequence[Any], BaseException | None, float]:
    """The outputs for the answers, or the error that all of them are told; and the seconds of waiting for its turn."""
    nothing = [None] * len(answers)
    if not answers:
        return nothing, None, 0.0  # All were cancelled while the batch was on its way.
    try:
        found, waited = as_waited(function([answer._value for answer in answers]))
        outputs = list(found)
    except DeviceLost:
        raise
    except Exception as error:
        return nothing, error, 0.0
    except BaseException as error:
        return nothing, ServeError(f"the function of model {model} wanted to end its thread by {error!r}"), 0.0
    if len(outputs) != len(answers):
        said = f"the function of model {model} returned {len(outputs)} outputs for {len(answers)} inputs"
        return nothing, ServeError(f"{said}; return as many"), waited
    return outputs, None, waited


def _tell(told: _Told) -> None:
    """Give the answers. What a callback raises does not keep the others from theirs."""
    for answer, output, error in told:
        try:
            if not answer._sent and not answer.set_running_or_notify_cancel():
                continue
            if error is None:
                answer.set_result(output)
            else:
                answer.set_exception(error)
        except BaseException:
            logger.exception("A callback of an answer of model %s has failed", answer._model)
