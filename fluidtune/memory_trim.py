"""Gives back to the machine what the C library keeps of memory that was freed.

Each thread of a process takes memory from one of several heaps ("arenas") of glibc, which keep the pages of what was
freed. Ray reads messages in many threads, and each worker that ends leaves holes: the arenas of a driver whose workers
were killed every few seconds grew by 0.6 MiB a minute, and did not with ``malloc_trim`` once a minute.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

#: Seconds between two trims. One takes 0.4 ms in a driver of 300 MiB (2 cores of an AMD EPYC).
EVERY_S = 60.0
#: The next one waits at least this many times as long as the last one took: 0.1 % of the time.
PAUSE = 1000


def _trim() -> None:
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return  # another C library than glibc
    malloc_trim(0)


class MemoryTrim:
    """Of this process. ``trim``: what gives memory back. ``clock``: seconds."""

    def __init__(self, trim: Callable[[], None] = _trim, clock: Callable[[], float] = time.monotonic):
        self._trim, self._clock = trim, clock
        self._next = clock() + EVERY_S

    def now_and_then(self) -> None:
        """Trim, if the last one is long enough ago. To be called often."""
        began = self._clock()
        if began >= self._next:
            self._trim()
            ended = self._clock()
            self._next = ended + max(EVERY_S, PAUSE * (ended - began))
