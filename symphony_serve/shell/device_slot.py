"""A device's place in the server: the task that runs what is sent to the device, and waits for it when it is lost.

Nothing is decided here. The server is told of each batch that has ended, and of the device's losses and returns. All
times are seconds.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.messages import BatchPassed, Dispatch, Event, GpuJoined, GpuLost
from symphony_serve.shell.device import Device, as_waited

logger = logging.getLogger(__name__)

#: A device that had no batch for this many seconds is looked at, by one call.
IDLE_S = 1.0


class Sent(NamedTuple):
    """A batch that was sent at the moment ``at``, and the answers to its requests that were wanted then."""

    batch: Dispatch
    answers: Sequence[Any]
    at: float


class Told(Protocol):
    """What a slot calls of its server."""

    @property
    def closed(self) -> bool:
        """Whether the server takes no request any more."""

    def tell(self, event: Event) -> None:
        """Let the scheduler handle the event, unless the server is closed."""

    def ended(self, slot: Slot, sent: Sent, outputs: Sequence[Any], error: Exception | None, waited: float) -> None:
        """A batch has run, after it had ``waited`` for its turn. error: that all of its requests get."""

    def gone(self, slot: Slot) -> None:
        """The device has left, or the server is closed, and all that was sent has run."""


class Slot:
    """A device in the server. token: the scheduler's name for the time since it last joined.

    models: it gets batches of these; None: of all. depth: how many batches it can have begun; more than one if it is a
    pipeline of stages. leaves, lost: the scheduler gives it no batch, for ever, or until it joins again.
    """

    def __init__(
        self, server: Told, number: int, device: Device, token: int, models: frozenset[str] | None, depth: int
    ):
        self.number, self.device, self.token, self.models = number, device, token, models
        self.leaves, self.lost = False, True
        self._server, self._depth = server, depth
        #: Nothing more is to come.
        self._ended = False
        #: What was sent and is not run yet, and what runs: one batch, or several in a pipeline, each with a task.
        self._waiting: deque[Sent] = deque()
        self._running: list[Sent] = []
        self._works: set[asyncio.Task[None]] = set()
        self._wakes = asyncio.Event()
        #: Of a pipeline, the newest plan that its first stage can have got. Those behind it have not begun.
        self._newest = 0
        #: Whether somebody waits until it is there again.
        self._awaited = False
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """It has joined the scheduler."""
        self._task = asyncio.create_task(self._serve(), name=f"serve-device-{self.number}")

    def put(self, batch: Dispatch, answers: Sequence[Any]) -> None:
        """A batch was sent."""
        self._waiting.append(Sent(batch, answers, time.monotonic()))
        self._wakes.set()

    def end(self) -> None:
        """Its task ends when it has run what was sent to it."""
        self._ended = True
        self._wakes.set()

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Those that go on."""
        return {*self._works, *([self._task] if self._task is not None else ())}

    def busy_with(self, model: str) -> bool:
        """Whether a batch of the model was sent, and not all of it is answered."""
        runs = (sent for sent in self._running if not all(one.done() for one in sent.answers))
        return any(sent.batch.model == model and sent.answers for sent in (*self._waiting, *runs))

    async def _serve(self) -> None:
        while self._waiting or not self._ended:
            if not self._waiting:
                self._wakes.clear()
                try:
                    await asyncio.wait_for(self._wakes.wait(), IDLE_S)
                except asyncio.TimeoutError:
                    if not self._running:
                        await self._look()
                continue
            work = self._run(self._waiting.popleft())
            if self._depth == 1:
                await work
            else:
                task = asyncio.create_task(work, name=f"serve-batch-{self.number}")
                self._works.add(task)
                task.add_done_callback(self._works.discard)
        if self._works:
            await asyncio.wait(self._works)
        self._server.gone(self)

    async def _run(self, sent: Sent) -> None:
        batch = sent.batch
        if batch.token != self.token:
            return  # It was given up with one before it.
        self._running.append(sent)
        try:
            passed = None if self._depth == 1 else functools.partial(self._passed, batch)
            self._server.ended(self, sent, *await _call(self.device, batch.model, sent.answers, passed))
        except DeviceLost as lost:
            await self._wait_for(batch.token, len(sent.answers), lost)
        except Exception:
            logger.exception("The task of device %d has failed; it begins anew", self.number)
            self._server.tell(self.lose())
            self.join_again()
        finally:
            self._running.remove(sent)
            self._left(batch)

    def _passed(self, batch: Dispatch) -> None:
        """The batch has left the first stage of a pipeline."""
        self._left(batch)
        if batch.token == self.token:
            self._server.tell(BatchPassed(batch.gpu, batch.token, batch.plan))

    def _left(self, batch: Dispatch) -> None:
        """The next batch can be in the first stage: each stage takes them in the order in which they were sent."""
        if batch.token == self.token:
            self._newest = max(self._newest, batch.plan + 1)

    async def _look(self) -> None:
        """The device is idle: is it there?"""
        token = self.token
        try:
            await self.device.check()
        except DeviceLost as lost:
            await self._wait_for(token, 0, lost)
        except Exception:
            logger.exception("A look at device %d has failed", self.number)
        self.join_again()  # If a batch was sent meanwhile, and given up.

    def lose(self) -> GpuLost:
        """The device is gone, or suspect. Returns what the scheduler must be told: what has begun there."""
        plans = [sent.batch.plan for sent in self._running if sent.batch.token == self.token]
        begun = frozenset(plan for plan in plans if plan <= self._newest)
        self.token, self.lost, self._newest = self.token + 1, True, 0
        return GpuLost(self.number, begun)

    async def _wait_for(self, token: int, count: int, lost: DeviceLost) -> None:
        """The device is gone with a batch of this token, and all others that it has. Wait until it is there again."""
        logger.warning("Device %d is lost (%s); its batch of %d requests is given up", self.number, lost, count)
        if token == self.token:  # Else it was suspect, or gone with another batch, and this one is given up already.
            self._server.tell(self.lose())
        if self._awaited:
            return
        self._awaited = True
        try:
            while not self._server.closed and not self.leaves and not await lost.back():
                pass
        except Exception:
            logger.exception("Whether device %d is there again cannot be said; it is tried", self.number)
        finally:
            self._awaited = False
        self.join_again()

    def join_again(self) -> None:
        """The device is there again, if it was lost: the scheduler gives it batches."""
        if self.lost and not self._server.closed and not self.leaves:
            self.lost = False
            self._server.tell(GpuJoined(self.number, self.token, models=self.models))


async def _call(
    device: Device, model: str, answers: Sequence[Any], passed: Callable[[], None] | None
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
