"""Ends collectives of GPUs that will not end by themselves, because a worker died or is in another collective.

On a CPU a collective fails when a peer's connections close. On a GPU it is a kernel that waits for its peers, and
nothing ends it when one of them dies: a thread that waits for the GPU, as in ``loss.item()``, would wait until NCCL's
time-out, after which NCCL's watchdog ends the process. So one thread a worker looks at the others while a collective
of its own GPU runs. If it finds that one is dead, or is at another place of the loop, it aborts the communicator. Then
the kernels end, the loop's thread goes on, and its next collective raises `GroupLost`.

The making of a communicator is no kernel, and cannot be aborted: `connect` waits for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from .lockstep import Place

#: Seconds between two looks. Issue 22 asks that the others go on within 2 s of a death: a look of the leader and one of
#: a follower take two periods, and the forming of the new group the rest.
WATCH_S = 0.2
#: Looks at which a collective has ended by NCCL's word and not by the GPU's, after which NCCL has given it up: it does
#: so when a connection breaks, and leaves the kernel waiting. Otherwise the two differ by microseconds.
_GIVEN_UP = 5


class GpuWork(Protocol):
    """A collective that was started on a GPU."""

    def is_completed(self) -> bool:
        """Whether NCCL has no more to do with it: it is done, or has failed."""

    def is_done(self) -> bool:
        """Whether the GPU has passed it."""


def connect(make: Callable[[], None], hopeless: Callable[[], str | None], patience: float) -> None:
    """Run ``make``, which waits for other workers and cannot be interrupted, in another thread.

    It raises what ``make`` raises. RuntimeError if ``hopeless`` returns why it will not end, or after ``patience``
    seconds; the thread is then left where it is.
    """
    outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            make()
        except Exception as error:
            outcome.put(error)
        else:
            outcome.put(None)

    threading.Thread(target=run, name="connecting GPUs", daemon=True).start()
    deadline = time.monotonic() + patience
    while True:
        try:
            error = outcome.get(timeout=WATCH_S)
        except queue.Empty:
            why = hopeless()
            if why is None and time.monotonic() > deadline:
                why = f"the GPUs were not connected within {patience:g} s"
            if why is not None:
                raise RuntimeError(why) from None
        else:
            if error is not None:
                raise error
            return


class StuckCollectives:
    """Watches one generation's collectives on a GPU, from its forming to `close`.

    ``hopeless``: gets the place of the oldest collective that runs, and returns why it will not end; None: it may.
    ``abort``: called once with that reason, and ends the group's collectives. Both are called in the thread of this
    object.
    """

    def __init__(self, hopeless: Callable[[Place], str | None], abort: Callable[[str], None]) -> None:
        self._hopeless, self._abort = hopeless, abort
        self._running: deque[tuple[GpuWork, Place]] = deque()
        self._given_up = 0  # looks at which the oldest collective was given up by NCCL
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._main, name="stuck collectives", daemon=True).start()

    def watch(self, work: GpuWork, place: Place) -> None:
        """Watch a collective that was just started; the collectives of a group end in the order of their start."""
        with self._lock:
            self._drop_done()
            self._running.append((work, place))

    def close(self) -> None:
        """Stop. When it returns, nothing is aborted any more."""
        with self._lock:
            self._closed.set()
            self._running.clear()

    def _main(self) -> None:
        while not self._closed.wait(WATCH_S):
            with self._lock:
                self._drop_done()
                oldest = self._running[0] if self._running else None
            why = None if oldest is None else self._hopeless(oldest[1]) or self._look_at(*oldest)
            with self._lock:
                if why is not None and not self._closed.is_set():
                    self._abort(why)
                    return

    def _look_at(self, work: GpuWork, place: Place) -> str | None:
        """Why a collective of workers that all live will not end."""
        self._given_up = self._given_up + 1 if _said(work.is_completed) and not _said(work.is_done) else 0
        return f"NCCL has given up {place[1]}, as after a broken connection" if self._given_up >= _GIVEN_UP else None

    def _drop_done(self) -> None:
        while self._running and _said(self._running[0][0].is_done):
            self._running.popleft()
            self._given_up = 0


def _said(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except RuntimeError:  # CUDA has failed: the loop's thread meets that by itself
        return True
