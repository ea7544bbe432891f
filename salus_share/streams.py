"""Several trials in one process on one device: a thread each, and on a GPU a CUDA stream and a memory pool per lane.

The jobs of a lane run on the lane's stream, one iteration at a time, and allocate from the lane's pool, so that the
next job uses the memory that one has freed. Models are made outside iterations. What an optimizer makes in the first
iteration stays in the pool. On a CPU the same code runs as threads.

A thread saves a process, a CUDA context and the switches between contexts. It has a price, so that processes are the
default:

- the GIL;
- trials share torch's global random streams, so a trial must draw from a `torch.Generator` of its own, or its result
  depends on its neighbours;
- a trial that allocates more than it said can make a neighbour fail, because CUDA limits processes only;
- while `torch.compile` works for one trial, `torch.compiler.is_compiling` is true in all threads, and the optimizers of
  the others round otherwise. The log says so (`InProcessLanes.compiled`);
- a trial that captures a CUDA graph must do so with ``capture_error_mode="thread_local"``: by default a call of any
  other thread breaks the capture (torch, docs of `torch.cuda.graph`). Beside another trial it is refused (`captures`).

This module decides nothing: the lane service admits, and the gate gives turns.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch

from salus_share.captures import captures
from salus_share.client import LaneClient
from salus_share.errors import ServiceLost
from salus_share.memory import FIRST, Usage
from salus_share.messages import Need

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class _Lane:
    """The stream and the pool of a lane while a job of this process is in it."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.MemPool()
        self.jobs: set[str] = set()


class _PoolUse:
    """Which threads of this process are in a memory pool.

    torch cannot empty its cache meanwhile: by its version it then does nothing, raises or ends the process
    (``captures_underway`` in torch's CUDACachingAllocator; pull requests 158152 and 182062 of pytorch).
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads = 0
        self._kept_out = False

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """This thread is in a pool."""
        with self._changed:
            self._changed.wait_for(lambda: not self._kept_out)
            self._threads += 1
        try:
            yield
        finally:
            with self._changed:
                self._threads -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def unused(self) -> Iterator[None]:
        """No thread is in a pool. Those that are in one are waited for; this thread must not be in one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._kept_out)
            self._kept_out = True
            self._changed.wait_for(lambda: not self._threads)
        try:
            yield
        finally:
            with self._changed:
                self._kept_out = False
                self._changed.notify_all()


class InProcessLanes:
    """The trials of this process on ``device``; the other parameters are those of `LaneClient`.

    Trials of other processes may be on the same device, under the same service.
    """

    def __init__(
        self, device: str | torch.device, name: str, *, capacity: int, policy: str, directory: Path | None = None
    ) -> None:
        self.device = torch.device(device)
        self._name = name
        self._options: dict[str, Any] = {"capacity": capacity, "policy": policy, "directory": directory}
        self._lanes: dict[int, _Lane] = {}
        self._lock = threading.Lock()
        self._pools = _PoolUse()
        #: Trials that were started and have not ended.
        self._running = 0
        self._told = False

    def start(
        self,
        trial: str,
        work: Callable[[LaneJob], Result],
        need: Need | None = None,
        *,
        remaining: float | None = None,
        rung: int = 0,
    ) -> Future[Result]:
        """Run ``work(job)`` in a thread, once the device admits the trial. The rest is as in `LaneClient.admit`.

        The future gets what ``work`` returns or raises. An error of one trial reaches no other trial. ``work`` builds
        its model and then runs every training step within ``job.iteration()``. Tensors in its result stay there.
        """
        future: Future[Result] = Future()

        with self._lock:
            self._running += 1
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            captures.enter()

        def leave(client: LaneClient) -> None:
            with self._lock:
                self._running -= 1
            if on_gpu:
                captures.leave()
            self.forget(trial)
            client.leave()

        def run() -> None:
            client = LaneClient(self._name, trial, **self._options)
            job = LaneJob(self, client, trial)
            try:
                client.admit(need, remaining=remaining, rung=rung)
                job.profiling = need is None
                with job.own_stream():
                    result = work(job)
            except BaseException as error:
                _clear(error)
                leave(client)
                future.set_exception(error)
            else:
                leave(client)
                future.set_result(result)

        threading.Thread(target=run, name=f"lane-{trial}", daemon=True).start()
        return future

    def lane(self, index: int, trial: str) -> _Lane:
        """The stream and pool of the lane that this trial is in now."""
        empty: list[_Lane] = []
        with self._lock:
            lane = self._lanes.get(index)
            if lane is None or trial not in lane.jobs:
                empty = self._drop(trial)
                lane = self._lanes.setdefault(index, lane or _Lane(self.device))
                lane.jobs.add(trial)
        if empty:
            with self._pools.unused():
                _free(empty)
        return lane

    def forget(self, trial: str) -> None:
        """The trial is in no lane any more, and what it held is free for other processes too."""
        with self._lock:
            empty = self._drop(trial)
        if self.device.type == "cuda":
            with self._pools.unused():
                _free(empty)
                torch.cuda.empty_cache()

    def compiled(self, trial: str) -> None:
        """A model was compiled within an iteration of this trial: say once what that does to the other trials."""
        if self._running > 1 and not self._told:
            self._told = True
            log.warning(
                "trial %s ran beside other trials of its process while torch.compile worked: these may round their"
                " steps otherwise; give a trial that compiles a process of its own",
                trial,
            )

    def in_pool(self) -> AbstractContextManager[None]:
        """Entered for as long as a thread allocates from a lane's pool."""
        return self._pools.used()

    def _drop(self, trial: str) -> list[_Lane]:
        """Take the trial out of its lane. Returns the lanes in which there is nobody any more."""
        for lane in self._lanes.values():
            lane.jobs.discard(trial)
        return [self._lanes.pop(index) for index, lane in list(self._lanes.items()) if not lane.jobs]


class LaneJob:
    """A trial as its ``work`` sees it."""

    def __init__(self, lanes: InProcessLanes, client: LaneClient, trial: str) -> None:
        self._lanes = lanes
        self._trial = trial
        #: Its lane client: `progress` and `need` are called on it.
        self.client = client
        #: Whether nobody knows its need, so that it is alone on the device and measures its first iterations.
        self.profiling = False
        self._iterations = 0
        #: What it was measured to need, until the service is told.
        self._asking: Need | None = None

    def yield_memory(self, timeout: float | None = None) -> None:
        """See `LaneClient.yield_memory`."""
        self._lanes.forget(self._trial)
        self.client.yield_memory(timeout)

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        """A stream for what the trial does between iterations, so that it waits for no other trial's work."""
        if self._lanes.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self._lanes.device), torch.cuda.stream(torch.cuda.Stream(self._lanes.device)):
            yield

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """One iteration in the trial's lane. Entering raises StaleToken as `Gate.iteration` does."""
        if self._asking is not None:
            asked, self._asking = self._asking, None
            try:
                self.client.need(asked)
            except ServiceLost:
                # It goes on with what it has, and asks again at the next boundary.
                self._asking = asked
        measured = self.profiling and self._lanes.device.type == "cuda"
        if measured:
            torch.cuda.reset_peak_memory_stats(self._lanes.device)
        frames = _compiled_frames()
        with self.client.iteration():
            if self._lanes.device.type == "cuda":
                with self._on_lane():
                    yield
            else:
                yield
        self._iterations += 1
        if _compiled_frames() != frames:
            self._lanes.compiled(self._trial)
        if measured and self._iterations == FIRST:
            held = torch.cuda.memory_allocated(self._lanes.device)
            peak = torch.cuda.max_memory_allocated(self._lanes.device)
            self.profiling = False
            # The CUDA context belongs to the process and not to the trial.
            self._asking = Usage(0, held, peak - held).need()

    @contextlib.contextmanager
    def _on_lane(self) -> Iterator[None]:
        gate = self.client.gate
        lane = self._lanes.lane(gate.lane, self._trial)
        outer = torch.cuda.current_stream(self._lanes.device)
        lane.stream.wait_stream(outer)
        try:
            # A backward pass in torch's own threads would allocate outside the pool, so it runs in this thread.
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.cuda.stream(lane.stream))
                stack.enter_context(self._lanes.in_pool())
                stack.enter_context(torch.cuda.use_mem_pool(lane.pool, self._lanes.device))
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                yield
        finally:
            # Also after an error: a trial that catches it goes on with what the iteration has done.
            outer.wait_stream(lane.stream)
        if gate.shared:
            # What is charged must be the time that the device takes. It matters only if the lane has other trials.
            lane.stream.synchronize()


def _free(lanes: list[_Lane]) -> None:
    """Free the memory of these lanes' pools; no thread may be in a pool.

    The end of torch's `MemPool` empties the cache of that pool, which raises while any thread is in a pool; and an
    error there ends the process (~MemPool in torch's MemPool.cpp, release_cached_blocks in its caching allocator).
    """
    while lanes:
        lanes.pop().stream.synchronize()


def _compiled_frames() -> int:
    """How many functions torch.compile has looked at in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])


def _clear(error: BaseException | None) -> None:
    """Free what the frames of a failed trial hold. Its error stays, in the future."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
