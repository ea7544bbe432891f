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

#: The first iterations of each trial, this many, have one line each: all those of a usual search, whose budgets are up
#: to 81 iterations (HyperBand's paper, Li et al. 2018, table 1), and 20 kB of each trial.
WHOLE_ITERATIONS = 100
#: After each change of who runs on the trial's devices this many have one line each. The first may have begun before
#: the change, and two more say how long they take now (`fluidtune.twin.measured` takes their median).
WHOLE_AFTER_CHANGE = 3
#: A trial that reports has a line after at most this many seconds, as in the log of a service. A killed
#: driver loses no more, and at 0.25 kB a line a trial writes 2 MB a day.
SHARED_SECONDS = 10.0

#: Events after which other trials may run on a device than before, or the same ones otherwise.
_CHANGES = frozenset(
    {
        "trial_started",
        "resized",
        "resize_failed",
        "trial_suspended",
        "trial_ended",
        "worker_lost",
        "recovered",
        "device_lost",
        "device_returned",
    }
)
#: Those of them after which their trial holds no device.
_LEAVES = frozenset({"trial_suspended", "trial_ended", "worker_lost"})

#: The fields of one ``trial_result``.
Line = dict[str, Any]


@dataclass
class _Trial:
    #: How many of its next iterations have a line of their own.
    whole: int = WHOLE_ITERATIONS
    #: When its last line was written, unix seconds.
    written: float = 0.0
    devices: frozenset[int] = frozenset()
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
    #: device -> the trials on it.
    _on: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

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
        if event not in _CHANGES:
            return self._due(named)
        devices = set(fields.get("devices", ())) | ({fields["device"]} if "device" in fields else set())
        concerned = named.union(*(self._on[device] for device in self._devices_of(named) | devices))
        lines = self._due(concerned)
        for name in concerned:
            self._by_trial[name].whole = max(self._by_trial[name].whole, WHOLE_AFTER_CHANGE)
        for name in named:
            if event in _LEAVES or "devices" in fields:
                self._move(name, frozenset(devices if event not in _LEAVES else ()))
            # One that is paused is not new when it goes on. If it never does, its end is told when Tune stops it.
            if event == "trial_ended" and fields.get("ending") != "paused":
                del self._by_trial[name]
        return lines

    def _due(self, names: Iterable[str]) -> list[Line]:
        held = self._by_trial
        return [held[name].take() for name in sorted(names) if name in held and held[name].last]

    def _devices_of(self, names: Iterable[str]) -> set[int]:
        return {device for name in names if name in self._by_trial for device in self._by_trial[name].devices}

    def _move(self, name: str, devices: frozenset[int]) -> None:
        for device in self._by_trial[name].devices:
            self._on[device].discard(name)
        for device in devices:
            self._on[device].add(name)
        self._by_trial[name].devices = devices
