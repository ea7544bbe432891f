"""Runs the sides of one comparison, and ends one that takes too long, so that it costs no other side its figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from benchmarks.common import PROCESS_LIMIT_S, Figures, NotEnded, say

#: A side is ended after this many times the seconds of the first side: twice the most that stock Ray Tune has
#: taken beside ours, 10.4 times (`tune_vs_fluid --trainable small`, docs/results).
TIMES = 20.0

T = TypeVar("T")


class SideLimit:
    """When a side of one comparison is ended.

    Args:
        stated: seconds, as the user gave them; None: `TIMES` times what the first run that ended took.
        first: seconds of the runs until then.
    """

    def __init__(self, stated: float | None = None, first: float = PROCESS_LIMIT_S) -> None:
        self._stated = stated
        self._first = first
        self._took: float | None = None
        #: Side -> the seconds that a run of it had taken when it was ended.
        self.not_ended: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Seconds after which the next run is ended."""
        if self._stated is not None:
            return self._stated
        return self._first if self._took is None else TIMES * self._took

    def run(self, side: str, run: Callable[[float], T]) -> T | None:
        """Run a side; ``run`` gets the seconds after which it raises `NotEnded`. None: it did so, now or before."""
        if side in self.not_ended:
            return None
        began = time.perf_counter()
        try:
            found = run(self.seconds)
        except NotEnded as error:
            self.not_ended[side] = time.perf_counter() - began
            say(f"{side} was ended: {error}")
            return None
        if self._took is None:
            self._took = time.perf_counter() - began
        return found

    def require(self, side: str) -> None:
        """Raises SystemExit if the side did not end: for one without which there is nothing to compare."""
        if side in self.not_ended:
            raise SystemExit(
                f"{side}, which the other sides are compared with, did not end within {self.not_ended[side]:.0f} s; "
                "give it longer with --limit SECONDS"
            )


def repeat(sides: Mapping[str, Callable[[float], Figures]], times: int, limit: SideLimit) -> dict[str, dict[str, Any]]:
    """Run all sides in turn, ``times`` times. Side -> the median of each figure, and all runs under ``all``.

    A side of which one run did not end has no figures, and is in ``limit.not_ended``.
    """
    collected: dict[str, list[Figures]] = {name: [] for name in sides}
    for turn in range(times):
        for name, side in sides.items():
            figures = limit.run(name, side)
            if figures is not None:
                collected[name].append(figures)
                shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
                say(f"[{turn + 1}/{times}] {name}: {shown}")
    return {
        name: {**{key: statistics.median(run[key] for run in runs) for key in runs[0]}, "all": runs}
        for name, runs in collected.items()
        if name not in limit.not_ended
    }
