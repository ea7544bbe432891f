"""What became of a run's device-seconds: iterations, starts, what lies between, and idle devices.

Only iterations are use (`Summary.utilisation`): a device that a trial holds while its process starts is held, and of no
use yet. Which trial holds which device is decided in fold.py. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from fluidtune.report.fold import Fold, Span, Trial
from fluidtune.report.occupancy import Occupancy, available_seconds, held_seconds


@dataclass(frozen=True)
class TimeUse:
    """Device-seconds of a run. Together they are all that the run had."""

    #: Inside iterations, each at its width.
    iterating: float
    #: Held by trials from their start on a device until the first iteration begins that they report from there.
    starting: float
    #: Held by trials otherwise: between two iterations, after the last, and in one that was not reported.
    between: float
    #: Held by no trial.
    idle: float


def starting(fold: Fold) -> list[Span]:
    """The parts of spans in which trials start: they hold devices, and their first iteration there has not begun."""
    return [part for trial in fold.trials.values() for part in _starting(fold, trial)]


def _starting(fold: Fold, trial: Trial) -> Iterator[Span]:
    lines, starts = list(trial.lines()), {note.number for note in trial.noted("trial_started")}
    until, goes_on = -math.inf, -1
    for span in fold.spans_of(trial.trial):
        if span.first in starts:
            place = bisect_left(lines, (span.first,))
            until = lines[place].began if place < len(lines) else math.inf
        elif span.first != goes_on:  # else it is resized while it starts
            until = -math.inf
        goes_on, end = span.last, min(span.end, until, fold.now)
        if end > span.start:
            yield span._replace(end=end)


def time_use(fold: Fold, use: Occupancy) -> TimeUse:
    """The device-seconds of a run with this occupancy.

    With lanes, an iteration whose width is 0, because other trials went first for an unknown part of it, counts as
    time between iterations.
    """
    counted = sum(line.width * line.seconds * line.times for _, line in fold.lines())
    available = available_seconds(use)
    # The first iteration at a new width is written after the resize, so a little more than what was held may be
    # counted.
    held = min(available, max(held_seconds(use), counted))
    iterating = min(counted, held)
    begun = sum((each.end - each.start) * each.width for each in starting(fold))
    starts = min(begun, held - iterating)
    return TimeUse(iterating, starts, held - iterating - starts, available - held)
