"""A stand-in of NCCL on the CPU, for what the real one is documented to do and gloo does not.

A collective only stands in a queue when the call returns; a thread, as a GPU's stream, does one after the other. It
waits for its peers, and does not notice that one of them died: only `abort` ends it, and what it then leaves in the
tensor is no sum. Before its first collective a communicator is made, which ends when all workers have come to it, or
when NCCL refuses it, and which not even `abort` ends. Whether the real NCCL behaves so is seen on GPUs only.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import torch
import torch.distributed as dist

from fluidtune.elastic.transport import TorchBackend


class StandInWork:
    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self._done = threading.Event()
        #: NCCL has met an error, by which it takes the collective for completed. The kernel goes on waiting.
        self.failed = False

    def is_completed(self) -> bool:
        return self._done.is_set() or self.failed

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        """Only the stream waits."""

    def complete(self) -> None:
        self._done.set()


class Communicator:
    """One worker's end. ``store``: through it the ends reach each other. No end hears that another one is gone."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._queue: queue.SimpleQueue[StandInWork | None] = queue.SimpleQueue()
        self._count = 0
        self._last: StandInWork | None = None
        self.aborted = threading.Event()
        threading.Thread(target=self._stream, daemon=True).start()

    def make(self, comes: str = "", raises: str = "", stops: bool = False) -> None:
        """The making of it. ``comes``: a file that shows that it has begun. ``raises``: how it ends, if it does.

        ``stops``: it never gets so far that the others see this worker.
        """
        if comes:
            open(comes, "w").close()
        if raises:
            raise RuntimeError(raises)
        if stops:
            threading.Event().wait()
        self._store.set(f"nccl/made/{self._rank}", b"")
        while not all(self._is_there(f"nccl/made/{rank}") for rank in range(self._world)):
            time.sleep(0.005)

    def _is_there(self, key: str) -> bool:
        with suppress(RuntimeError):  # the store's process died: nobody comes
            return bool(self._store.check([key]))
        return False

    def break_connection(self) -> None:
        """What NCCL does when a connection breaks while a collective waits."""
        assert self._last is not None
        self._last.failed = True

    def start(self, run: Callable[[], None]) -> StandInWork:
        work = self._last = StandInWork(run)
        self._queue.put(work)
        return work

    def all_reduce(self, tensor: torch.Tensor) -> StandInWork:
        number = self._count = self._count + 1

        def run() -> None:
            self._store.set(f"nccl/{number}/{self._rank}", tensor.numpy().tobytes())
            rows = [self._from(f"nccl/{number}/{rank}", tensor) for rank in range(self._world)]
            tensor.copy_(torch.stack(rows).sum(0))

        return self.start(run)

    def compute(self, seconds: float) -> StandInWork:
        """A kernel that takes so long."""
        return self.start(lambda: time.sleep(seconds))

    def synchronize(self) -> None:
        """Wait for all that was started, as ``tensor.item()`` does."""
        while self._last is not None and not self._last.is_done():
            time.sleep(0.005)

    def _from(self, key: str, like: torch.Tensor) -> torch.Tensor:
        while not self.aborted.is_set():
            with suppress(RuntimeError):  # the store's process died: no news for a kernel
                if self._store.check([key]):
                    return torch.frombuffer(bytearray(self._store.get(key)), dtype=like.dtype).view_as(like)
            time.sleep(0.005)
        return torch.full_like(like, torch.nan)

    def shutdown(self) -> None:
        """Nothing is to be done here."""

    def end(self) -> None:
        """Nothing more is started: the thread ends after what has been."""
        self._queue.put(None)

    def _stream(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()
            work.complete()


class NcclStandIn(TorchBackend):
    """`TorchBackend` whose sums are a GPU's. ``gpu``: its UUID. ``making``: see `Communicator.make`."""

    def __init__(self, *args: object, gpu: str = "", making: tuple[str, str, bool] = ("", "", False), **kwargs: object):
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.gpu, self.making = gpu, making
        #: What CUDA says to whatever is asked of it; "": it works.
        self.cuda_error = ""
        #: Of NCCL's settings, those that were in the environment when the process group was made.
        self.settings: dict[str, str] = {}
        self.communicator: Communicator | None = None
        #: Communicators that were aborted.
        self.aborts = 0
        #: A worker that a test will kill; None: none.
        self.doomed: int | None = None
        #: How often this worker has looked who lives since that one was dead.
        self.looks = 0

    def _death(self, world: int | None = None) -> str | None:
        self.looks += self.doomed is not None and _is_dead(self.doomed)
        return super()._death(world)

    def _gpu(self) -> str:
        return self.gpu

    def _make_nccl(self, store: dist.Store, rank: int, world: int) -> Communicator:
        self.settings = {name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL_")}
        if self.communicator is not None:
            self.communicator.end()
        self.communicator = Communicator(store, rank, world)
        return self.communicator

    def _dissolve(self, in_order: bool) -> None:
        super()._dissolve(in_order)
        if self.communicator is not None:
            self.communicator.end()
            self.communicator = None

    def _first_collective(self) -> Callable[[], None]:
        communicator = self.communicator
        assert communicator is not None
        return lambda: communicator.make(*self.making)

    def _watched(self, work: object) -> object:  # type: ignore[override]
        return work

    def _is_on_gpu(self) -> bool:
        return True

    def _has_cuda_failed(self) -> bool:
        return bool(self.cuda_error)

    def _allreduce_(self, tensor: torch.Tensor) -> None:
        assert self.communicator is not None
        if self.cuda_error:
            raise RuntimeError(self.cuda_error)
        self._let_gpu_wait(self.communicator.all_reduce(tensor))

    def _abort_on_gpu(self) -> None:
        assert self.communicator is not None
        self.aborts += not self.communicator.aborted.is_set()
        self.communicator.aborted.set()


def _is_dead(pid: int) -> bool:
    """Whether the process has ended, be it that nobody has asked how: its connections are closed then."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
