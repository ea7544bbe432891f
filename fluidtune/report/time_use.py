"""What became of a run's device-seconds: iterations, starts, moves, what lies between, and idle devices.

Only iterations are use (`Summary.utilisation`): a device that a trial holds while its process starts is held, and of no
use yet. Which trial holds which device is decided in fold.py. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
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
    #: Held by trials that paused for a resize.
    moving: float
    #: Held by trials otherwise: between two iterations, after the last, and in one that was not reported.
    between: float
    #: Held by no trial.
    idle: float


def starts_of(fold: Fold, trial: Trial) -> list[tuple[float, float]]:
    """From when until when the trial held devices and its first iteration there had not begun, unix seconds."""
    spans, lines, found = fold.spans_of(trial.trial), trial.lines(), []
    starts = {note.number for note in trial.noted("trial_started")}
    line = next(lines, None)
    for place, span in enumerate(spans):
        if span.first not in starts:
            continue
        end, number = span.end, span.last
        for after in spans[place + 1 :]:  # it is resized while it starts
            if after.first != number or after.first in starts:
                break
            end, number = after.end, after.last
        while line is not None and line.number < span.first:
            line = next(lines, None)
        if line is not None and (number < 0 or line.number < number):
            end = line.began
        found.append((span.start, max(span.start, min(end, fold.now))))
    return found


def starting(fold: Fold, use: Occupancy) -> list[Span]:
    """Those parts of the spans in which trials start."""
    starts = {name: starts_of(fold, trial) for name, trial in fold.trials.items()}
    found = []
    for each in use.spans:
        place = bisect_right(starts[each.trial], each.start, key=lambda window: window[0])
        if place and each.start < (until := starts[each.trial][place - 1][1]):
            found.append(each._replace(end=min(each.end, until)))
    return found


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
    begun = sum((each.end - each.start) * each.width for each in starting(fold, use))
    starts = min(begun, held - iterating)
    paused = sum(note.resize.seconds * note.resize.before.width for note in fold.notes if note.resize)
    moving = min(paused, held - iterating - starts)
    return TimeUse(iterating, starts, moving, held - iterating - starts - moving, available - held)
