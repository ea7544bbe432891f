"""Which iterations have one line each in the event log, and which share one, so that a log stays small.

A loop of a millisecond would write 13 MB of lines in a minute. What they say beyond their sum is of use where a trial
is new, or its neighbours or devices have just changed. Everywhere else one line stands for all iterations of ten
seconds. A shared line is complete: iterations, their seconds, and the last one's number, metric and need of memory.
docs/events.md says what that means for readers. Pure: the caller says what time it is, and writes the lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fluidtune.report.fold import NOTHING, Holdings

#: The first iterations of each trial, this many, have one line each: all those of a usual search, whose budgets are up
#: to 81 iterations (HyperBand's paper, Li et al. 2018, table 1), and 20 kB of each trial.
WHOLE_ITERATIONS = 100
#: After each change of who runs on the trial's devices this many have one line each. The first may have begun before
#: the change, and two more say how long they take now (`fluidtune.report.measured` takes their median).
WHOLE_AFTER_CHANGE = 3
#: A trial that reports has a line after at most this many seconds, as in the log of a service. A killed
#: driver loses no more, and at 0.25 kB a line a trial writes 2 MB a day.
SHARED_SECONDS = 10.0

#: The fields of one ``trial_result``.
Line = dict[str, Any]


@dataclass
class _Trial:
    #: How many of its next iterations have a line of their own.
    whole: int = WHOLE_ITERATIONS
    #: When its last line was written, unix seconds.
    written: float = 0.0
    #: The last iteration that has no line yet; None: all have one.
    last: Line | None = None
    #: Iterations without a line: their number, their seconds, and when the first began (unix seconds).
    count: int = 0
    seconds: float = 0.0
    began: float = 0.0

    def shares(self, line: Line) -> bool:
        """Whether an iteration can be in one line with those that have none yet."""
        return self.last is None or (self.last["width"] == line["width"] and self.last.keys() == line.keys())

    def add(self, line: Line, now: float) -> None:
        if self.last is None:
            self.count, self.seconds, self.began = 0, 0.0, now - line["seconds"]
        self.last, self.count, self.seconds = line, self.count + 1, self.seconds + line["seconds"]

    def take(self) -> Line:
        """The line of those that have none yet."""
        assert self.last is not None
        line, self.last = self.last, None
        if self.count == 1:
            return line
        return {**line, "seconds": self.seconds / self.count, "iterations": self.count, "began": self.began}


@dataclass
class IterationLines:
    """The iterations of one job's trials. Each method returns the lines that are to be written now, in their order."""

    _by_trial: dict[str, _Trial] = field(default_factory=lambda: defaultdict(_Trial))
    #: Who holds what, by the events so far.
    use: Holdings = field(default_factory=Holdings)

    def iteration(self, line: Line, now: float) -> list[Line]:
        """A trial has done an iteration at ``now`` (unix seconds). ``line``: its line, if it had one alone."""
        trial = self._by_trial[line["trial"]]
        lines = [] if trial.shares(line) else [trial.take()]
        trial.add(line, now)
        # A clock that was set back makes a line as well.
        if trial.whole > 0 or not 0 <= now - trial.written < SHARED_SECONDS:
            trial.whole, trial.written = max(0, trial.whole - 1), now
            lines.append(trial.take())
        return lines

    def before(self, event: str, fields: Mapping[str, Any]) -> list[Line]:
        """Another event is about to be written. The iterations of the trials that it concerns come before it."""
        if event == "run_ended":
            return self._due(self._by_trial)
        named = {fields["trial"]} if isinstance(fields.get("trial"), str) else set()
        use = self.use
        held, hurt = dict(use.held), set(use.hurt)
        use.step({"t": 0.0, "event": event, **fields})
        use.spans.clear()
        moved = {trial for trial in held.keys() | use.held.keys() if held.get(trial) is not use.held.get(trial)}
        spans = [each.get(trial, NOTHING) for trial in moved for each in (held, use.held)]
        devices = {device for span in spans for device in span.devices}
        concerned = {*moved, *use.holders(*devices), *(use.hurt - hurt)}
        lines = self._due(named | concerned)
        for name in concerned:
            self._by_trial[name].whole = max(self._by_trial[name].whole, WHOLE_AFTER_CHANGE)
        # One that is paused is not new when it goes on. If it never does, its end is told when Tune stops it.
        if event == "trial_ended" and fields.get("ending") != "paused":
            self._by_trial.pop(fields["trial"], None)
        return lines

    def _due(self, names: Iterable[str]) -> list[Line]:
        held = self._by_trial
        return [held[name].take() for name in sorted(names) if name in held and held[name].last]
