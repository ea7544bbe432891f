"""Ends collectives of GPUs that will not end by themselves, because a worker died or is in another collective.

On a CPU a collective fails when a peer's connections close. On a GPU it is a kernel that waits for its peers, and
nothing ends it when one of them dies: a thread that waits for the GPU, as in ``loss.item()``, would wait until NCCL's
time-out, after which NCCL's watchdog ends the process. So one thread a worker looks at the others while a collective
of its own GPU runs. If it finds that one is dead, or is at another place of the loop, it aborts the communicator. Then
the kernels end, the loop's thread goes on, and its next collective raises `GroupLost`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from .lockstep import Place

#: Seconds between two looks. Judgement: issue 22 asks that the others go on within 2 s of a death; of these, a look of
#: the leader and one of a follower take two periods, and the forming of the new group the rest.
WATCH_S = 0.2


class GpuWork(Protocol):
    """What torch.distributed returns for a collective that was started and may not have ended."""

    def is_completed(self) -> bool: ...


class StuckCollectives:
    """Watches one generation's collectives on a GPU, from its forming to `close`.

    ``hopeless``: gets the place of the oldest collective that runs, and returns why it will not end; None: it may.
    ``abort``: called once with that reason, and ends the group's collectives. Both are called in the thread of this
    object.
    """

    def __init__(self, hopeless: Callable[[Place], str | None], abort: Callable[[str], None]) -> None:
        self._hopeless, self._abort = hopeless, abort
        self._running: deque[tuple[GpuWork, Place]] = deque()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._main, name="stuck collectives", daemon=True).start()

    def watch(self, work: GpuWork, place: Place) -> None:
        """Watch a collective that was just started; the collectives of a group end in the order of their start."""
        with self._lock:
            self._drop_completed()
            self._running.append((work, place))

    def close(self) -> None:
        """Stop. When it returns, nothing is aborted any more."""
        with self._lock:
            self._closed.set()
            self._running.clear()

    def _main(self) -> None:
        while not self._closed.wait(WATCH_S):
            with self._lock:
                self._drop_completed()
                place = self._running[0][1] if self._running else None
            why = None if place is None else self._hopeless(place)
            with self._lock:
                if why is not None and not self._closed.is_set():
                    self._abort(why)
                    return

    def _drop_completed(self) -> None:
        while self._running and self._running[0][0].is_completed():
            self._running.popleft()
