"""Worker processes that start: each takes its time, and longer when more of them start than the machine has cores for.

They share the machine evenly, so that eight which begin together are there together, late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class _Start:
    left: float
    then: Callable[[], None]


class Starts:
    """``seconds``: of one by itself. ``at_once``: how many at a time are not slowed down.

    ``at``: calls something after so many seconds. ``now``: the time, seconds.
    """

    def __init__(
        self,
        seconds: float,
        at_once: float,
        at: Callable[[float, Callable[[], None]], None],
        now: Callable[[], float],
    ):
        self._seconds, self._at_once, self._at, self._now = seconds, at_once, at, now
        self._under_way: list[_Start] = []
        self._since = 0.0
        self._plan = 0

    def begin(self, then: Callable[[], None]) -> None:
        """Start one more; ``then`` is called when it is there."""
        self._pass()
        self._under_way.append(_Start(self._seconds, then))
        self._expect()

    @property
    def _rate(self) -> float:
        return min(1.0, self._at_once / max(1, len(self._under_way)))

    def _pass(self) -> None:
        passed = (self._now() - self._since) * self._rate
        self._since = self._now()
        for start in self._under_way:
            start.left -= passed

    def _expect(self) -> None:
        """Wake up when the next one is there, unless another one begins before."""
        self._plan += 1
        plan = self._plan
        if self._under_way:
            after = max(0.0, min(start.left for start in self._under_way)) / self._rate
            self._at(after, lambda: self._there() if plan == self._plan else None)

    def _there(self) -> None:
        self._pass()
        there = [start for start in self._under_way if start.left <= 1e-9]
        self._under_way = [start for start in self._under_way if start.left > 1e-9]
        self._expect()
        for start in there:
            start.then()
