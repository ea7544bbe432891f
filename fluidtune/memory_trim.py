"""Keeps a process that lives long from holding memory that was freed.

Each thread of a process takes memory from one of several heaps ("arenas") of glibc, which keep the pages of what was
freed. Ray reads messages in many threads. A driver's threads share one heap (`one_heap`): what they had freed made up
12 of the 53 KiB by which it grew for each trial, and then 1 of 43 (1,200 trials, ``benchmarks.driver_growth``). A
process in which Ray's threads came first gives memory back once a minute (`MemoryTrim`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress

#: Seconds between two trims. One takes 0.4 ms in a driver of 300 MiB (2 cores of an AMD EPYC).
EVERY_S = 60.0
#: The next one waits at least this many times as long as the last one took: 0.1 % of the time.
PAUSE = 1000


#: ``M_ARENA_MAX`` of glibc's <malloc.h>.
_ARENA_MAX = -8


def one_heap() -> None:
    """Have the threads that are still to come share the heaps that there are: one, before Ray has started."""
    with suppress(AttributeError, OSError, TypeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def _trim() -> None:
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


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
