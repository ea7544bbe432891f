"""How long iterations took, where a line of the log may stand for several of them.

A line of one iteration counts once, and one of several as often as it has iterations, each as long as their mean. So
their number and their seconds together are exact, and the median is one of the means where most iterations share lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

from fluidtune.report.events import EventDict


def iterations_in(result: EventDict) -> int:
    """How many iterations a ``trial_result`` stands for."""
    return int(result.get("iterations") or 1)


def width_of(value: float) -> float:
    """A width as a dictionary key: rounded to 4 digits, so that 1/3 is one width however it was computed."""
    return round(float(value), 4)


@dataclass
class Durations:
    """Seconds of iterations."""

    #: Number of iterations.
    count: int = 0
    #: Their seconds together.
    total: float = 0.0
    #: Of each line the (mean) seconds of an iteration, and their number.
    _lines: list[tuple[float, int]] = field(default_factory=list)

    def add(self, result: EventDict) -> None:
        """Count a ``trial_result``, whose seconds are known."""
        seconds, times = float(result["seconds"]), iterations_in(result)
        self.count += times
        self.total += times * seconds
        self._lines.append((seconds, times))

    def median(self) -> float:
        """The median of all iterations. There must be one."""
        if len(self._lines) == self.count:
            return median(seconds for seconds, _ in self._lines)
        lines = sorted(self._lines)
        until = list(accumulate(times for _, times in lines))

        def at(place: int) -> float:
            return next(seconds for (seconds, _), end in zip(lines, until, strict=True) if place < end)

        return (at((self.count - 1) // 2) + at(self.count // 2)) / 2
