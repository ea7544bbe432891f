"""What became of a run's device-seconds: iterations, starts, moves, what lies between, and idle devices.

This module decides which of these a second counts as. Only iterations are use (`Summary.utilisation`): a device that a
trial holds while its process starts is held, and of no use yet. Which trial holds which device is decided in
occupancy.py. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fluidtune.report.events import EventDict, iterations_in
from fluidtune.report.occupancy import Occupancy, Replay, available_seconds, held_seconds


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


class _Counted:
    """What the events say of iterations, starts and moves, in device-seconds."""

    def __init__(self) -> None:
        self.iterating = self.starting = self.moving = 0.0
        self._replay = Replay()
        #: trial -> since when it starts, and its width.
        self._starting: dict[str, tuple[float, float]] = {}

    def step(self, event: EventDict) -> None:
        replay, name, trial = self._replay, event["event"], event.get("trial")
        if name == "trial_result" and event["seconds"] is not None and event["width"] is not None:
            seconds = float(event["seconds"]) * iterations_in(event)
            self.iterating += max(0.0, float(event["width"]) * seconds)
            self._started(event["trial"], float(event.get("began", event["t"] - seconds)))
        elif name == "resized" and event["seconds"] is not None:
            self.moving += float(event["seconds"]) * replay.of(event["trial"]).width
        elif name == "trial_started":
            self._started(event["trial"], replay.now)
        replay.step(event)
        for waiting in [waiting for waiting in self._starting if waiting not in replay.held]:
            self._started(waiting, replay.now)  # it left before its first iteration
        if name == "trial_started" and trial in replay.held:
            self._starting[str(trial)] = replay.now, replay.of(str(trial)).width

    def end(self) -> None:
        for trial in list(self._starting):
            self._started(trial, self._replay.now)

    def _started(self, trial: str, at: float) -> None:
        since, width = self._starting.pop(trial, (at, 0.0))
        self.starting += max(0.0, at - since) * width


def time_use(events: Iterable[EventDict], use: Occupancy) -> TimeUse:
    """The device-seconds of a run with this occupancy.

    With lanes, an iteration whose width is 0, because other trials went first for an unknown part of it, counts as
    time between iterations.
    """
    counted = _Counted()
    for event in events:
        counted.step(event)
    counted.end()
    available = available_seconds(use)
    # The first iteration at a new width is written after `resized`, so a little more than what was held may be counted.
    held = min(available, max(held_seconds(use), counted.iterating))
    iterating = min(counted.iterating, held)
    starting = min(counted.starting, held - iterating)
    moving = min(counted.moving, held - iterating - starting)
    return TimeUse(iterating, starting, moving, held - iterating - starting - moving, available - held)
