"""A group of processes in a row, each with a stage of the model: what the front calls of `staged_process`.

A group is one thing: when one of its processes ends, all end, and all start anew with the same cut. All times are
seconds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayError

from fluidtune.serving.loaded_model import Outcome, Packed
from fluidtune.serving.process import HUNG_S, Process, fetched, said_of
from fluidtune.serving.staged_process import Passed, StageProcess, Started
from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.shell.device import Waited

#: The batches that found the group empty of which the time between stages is remembered. Judgement: its median is exact
#: to a tenth of its spread.
HOPS = 64


class StageGroup(Process):
    """A group of ``count`` processes; the other arguments are those of `Process`. room: bytes of weights of each.

    Several batches may be in it. `run` returns in the order in which it was called.
    """

    ACTOR = ray.remote(StageProcess)

    def __init__(self, count: int, room: float, *given: Any):
        self._count, self._room = count, room
        #: How many batches are in it, and what is set when the latest one is not any more.
        self._flying, self._latest = 0, asyncio.Event()
        self._latest.set()
        #: Seconds that batches which found it empty took, besides those within stages.
        self._hops: deque[float] = deque([0.0], maxlen=HOPS)
        super().__init__(*given)

    def _make(self, options: Mapping[str, Any]) -> list[Any]:
        made = [self.ACTOR.options(**options, **self._place_of(number)) for number in range(self._count)]
        return [one.remote(self._loading, number, self._count, self._room) for number, one in enumerate(made)]

    def _ask(self, what: str, *given: Any) -> Any:
        """Ray's reference to what the last process answers. Each gets what the one before answers."""
        first = Started((), {}, tuple(self.stages)) if what == "ready" else None
        told = given[0] if given else first
        for actor in self._actors:
            told = getattr(actor, what).remote(told)
        return told

    def _take_in(self, answer: Started) -> None:
        pids, samples, stages = answer
        self.pids, self.samples, self.stages = list(pids), samples[self.key], list(stages)

    async def run(self, inputs: list[Any], passed: Callable[[], None] | None = None) -> Waited:
        """An `Outcome` for each input, and the seconds that the batch has stood before stages."""
        with self._in_order() as before:
            packed = [Packed.of(one) for one in inputs]
            whole, waited = await self._through(packed, before, passed)
            if whole.failed is None:
                return Waited(whole.value, waited)
            if len(packed) == 1:
                return Waited([whole.failed], waited)
            outcomes: list[Outcome] = []
            for one in packed:
                alone = (await self._through([one], before))[0]
                outcomes += [alone.failed] if alone.failed is not None else alone.value
            return Waited(outcomes, waited)

    async def measure(self, inputs: list[Any]) -> Waited:
        """As `run`, but what fails raises."""
        with self._in_order() as before:
            passed = (await self._through([Packed.of(one) for one in inputs], before))[0]
        if passed.failed is not None:
            raise ServeError(json.loads(passed.failed[1])["error"])
        return Waited(passed.value, 0.0)

    @contextmanager
    def _in_order(self) -> Iterator[asyncio.Event]:
        """What is set when the batch before this one is not in the group any more; this one is within the context."""
        before, ended = self._latest, asyncio.Event()
        self._latest = ended
        try:
            yield before
        finally:
            ended.set()

    async def _through(
        self, inputs: list[Packed], before: asyncio.Event, passed: Callable[[], None] | None = None
    ) -> tuple[Passed, float]:
        """The batch after all stages, and the seconds that it has stood before them, or behind the batch before it.

        Raises DeviceLost. ``before``: see `_in_order`. ``passed``: is called when it has left the first stage.
        """
        self._check_ready()
        began, empty, process = time.monotonic(), not self._flying, self._processes
        self._flying += 1
        try:
            try:
                answer = self._answer(Passed(inputs, len(inputs)), passed)
                batch: Passed = await fetched(answer, HUNG_S)
                besides = time.monotonic() - began - sum(batch.seconds)
            except RayError as error:
                if process == self._processes:  # Else the group was replaced because of another batch.
                    self._plainly(error)
                    self._lose(said_of(error), process)
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
        return batch, 0.0

    def _answer(self, batch: Passed, passed: Callable[[], None] | None) -> Any:
        """Ray's reference to the batch after all stages. ``passed``: see `_through`."""
        first, *others = self._actors
        if passed is None or not others:
            return self._ask("run", batch)
        told, left = first.run_first.options(num_returns=2).remote(batch)
        loop = asyncio.get_running_loop()

        def hear(answer: Any) -> None:
            if answer.exception() is None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(passed)

        left.future().add_done_callback(hear)
        for actor in others:
            told = actor.run.remote(told)
        return told
