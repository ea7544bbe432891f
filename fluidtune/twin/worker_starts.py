"""Worker processes that start on a machine of few cores, in virtual time: in the order in which they were asked for.

Only a limited number starts at a time, as in `fluidtune.cluster.pool`. That number is read off the job's log.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial


class WorkerStarts:
    """Starts of worker processes.

    Args:
        seconds: how long the start of one process takes if no other starts.
        at_once: how many can start at a time without slowing each other down; a fraction counts in part.
        call_after: calls a function after a number of seconds.
    """

    def __init__(self, seconds: float, at_once: float, call_after: Callable[[float, Callable[[], None]], None]):
        self._most = math.inf if math.isinf(at_once) else math.ceil(at_once)
        self._seconds = seconds if math.isinf(at_once) else seconds * self._most / at_once
        self._call_after = call_after
        #: What is to be called when each of the processes that wait is there.
        self._waiting: deque[Callable[[], None]] = deque()
        self._under_way = 0

    def start_worker(self, then: Callable[[], None]) -> None:
        """Start one more process; ``then`` is called when it is there."""
        self._waiting.append(then)
        self._start_next()

    def _start_next(self) -> None:
        while self._waiting and self._under_way < self._most:
            self._under_way += 1
            self._call_after(self._seconds, partial(self._started, self._waiting.popleft()))

    def _started(self, then: Callable[[], None]) -> None:
        self._under_way -= 1
        self._start_next()
        then()
