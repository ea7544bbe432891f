"""Worker processes that start: no more at a time than the machine has cores for, in the order they were asked for.

As in `fluidtune.cluster.pool`; how many that are is read off the job's log.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial


class Starts:
    """``seconds``: of one by itself. ``at_once``: how many at a time are not slowed down.

    ``at``: calls something after so many seconds.
    """

    def __init__(self, seconds: float, at_once: float, at: Callable[[float, Callable[[], None]], None]):
        self._most = math.inf if math.isinf(at_once) else math.ceil(at_once)
        self._seconds = seconds if math.isinf(at_once) else seconds * self._most / at_once
        self._at = at
        self._waiting: deque[Callable[[], None]] = deque()
        self._under_way = 0

    def begin(self, then: Callable[[], None]) -> None:
        """Start one more; ``then`` is called when it is there."""
        self._waiting.append(then)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._under_way < self._most:
            self._under_way += 1
            self._at(self._seconds, partial(self._there, self._waiting.popleft()))

    def _there(self, then: Callable[[], None]) -> None:
        self._under_way -= 1
        self._go_on()
        then()
