"""A run as it is now, from the events that there are so far.

`LiveRun` takes in one event after the other, each in constant time, so that a run may be watched for days. It decides
what is worth saying of a trial, and which events are news. Which trial holds which device follows from `occupancy`.
`LogTail` reads what a log has got since the last look. How it looks is decided in top.py.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluidtune.report.causes import Resizes, label_of
from fluidtune.report.events import (
    EVENT_LOG_NAME,
    EventDict,
    NoEventLogError,
    find_log,
    iterations_in,
    may_be_cut,
    not_a_log,
    reading,
    record_of,
)
from fluidtune.report.occupancy import Replay
from fluidtune.report.summary import best_of

#: The events that a person should see, and what is said of them.
NEWS = {
    "device_lost": "device {device} is lost{because}",
    "worker_lost": "the worker {worker} on device {device} died{because}",
    "recovered": "{trial} goes on from iteration {iteration}",
    "resize_failed": "{trial} was not resized{because}",
    "not_committed": "{trial} has no commit of its last iteration{because}",
    "growth_ended": "{trial} has one worker from now on{because}",
    "room_lacking": "device {device} has no room for {trial}{because}",
    "serving_failed": "the models cannot be served{because}",
}
#: Event -> the state of its trial after it.
STATES = {
    **dict.fromkeys(("trial_added", "trial_suspended", "worker_lost", "room_lacking"), "waiting"),
    **dict.fromkeys(("trial_started", "trial_result", "resized", "resize_failed"), "running"),
    "resize_started": "resizing",
}


@dataclass
class LiveTrial:
    """One trial: its last result, and what it does. ``since``: when it last reported or changed, unix seconds."""

    trial: str
    since: float
    #: "waiting", "running", "resizing", "silent"; once Tune has paused or ended it "paused", "stopped" or "failed".
    state: str = "waiting"
    iteration: int = 0
    #: The last iteration of its budget; None if that is unknown.
    target: int | None = None
    #: Seconds of its last iteration.
    seconds: float | None = None
    metric: float | None = None
    #: Why its width or its devices changed last, or are changing: the label of the engine's reason; "" if unknown.
    why: str = ""


@dataclass
class LiveRun:
    """The state of a run after some of its events."""

    #: The run_started of the last driver; empty if there is none.
    head: EventDict = field(default_factory=dict)
    use: Replay = field(default_factory=Replay)
    trials: dict[str, LiveTrial] = field(default_factory=dict)
    #: device -> its machine, and its last device_sample.
    nodes: dict[int, str] = field(default_factory=dict)
    samples: dict[int, EventDict] = field(default_factory=dict)
    #: Worker processes that were started, those of them that were forked and that were spares, and spares in use.
    workers: Counter[str] = field(default_factory=Counter)
    resizes: Resizes = field(default_factory=Resizes)
    #: Iterations of the last minutes: begin and end, unix seconds, and how many they are.
    results: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=100_000))
    #: The latest news: unix seconds, and a line.
    news: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=50))

    def hear(self, events: Iterable[EventDict]) -> None:
        """Take in what has happened since the last call."""
        for event in events:
            self._step(event)
            self.use.step(event)

    @property
    def best(self) -> tuple[str, float] | None:
        """The best trial and its value of Tune's metric, by the trials' last results."""
        mode = self.head.get("mode")
        last = {name: trial.metric for name, trial in self.trials.items()}
        return best_of(last, mode) if mode in ("min", "max") else None

    @property
    def states(self) -> Counter[str]:
        """How many trials are in each state."""
        return Counter(trial.state for trial in self.trials.values())

    def ended_since(self, when: float) -> int:
        """How many iterations ended since ``when``, unix seconds. Those that share a line ended at equal distances."""
        return round(
            sum(
                times * min(1.0, (end - when) / (end - began) if end > began else 1.0)
                for began, end, times in self.results
                if end > when
            )
        )

    def _step(self, event: EventDict) -> None:
        name, at = event["event"], float(event["t"])
        cause = self.resizes.step(event)
        if name == "run_started":
            if self.head:
                self._say(at, "the run goes on in another driver")
                for trial in self.trials.values():
                    if trial.state in ("running", "resizing", "silent"):
                        trial.state = "waiting"
            self.head = event
            self.nodes = {int(device["device"]): str(device["node"]) for device in event["devices"]}
        elif name == "device_gained":
            self.nodes[int(event["device"])] = str(event["node"])
        elif name == "device_sample":
            self.samples[int(event["device"])] = event
        elif name == "worker_started":
            self.workers.update(["started", *(what for what in ("forked", "spare") if event.get(what))])
        elif name == "spare_taken":
            self.workers["taken"] += 1
        elif isinstance(event.get("trial"), str) and name != "model_measured":
            trial = self.trials.setdefault(event["trial"], LiveTrial(event["trial"], at))
            self._trial_step(trial, name, at, event, cause)
        if name in NEWS:
            reason = str(event.get("reason") or "").strip()
            because = f": {reason.splitlines()[0]}" if reason else ""
            self._say(at, NEWS[name].format_map({**event, "because": because}))

    def _trial_step(self, trial: LiveTrial, name: str, at: float, event: EventDict, cause: EventDict | None) -> None:
        """``cause``: the event that says why, if this one ends a resize."""
        if name in STATES:
            trial.since, trial.state = at, STATES[name]
        if name == "trial_result":
            trial.iteration, trial.seconds, trial.metric = int(event["iteration"]), event["seconds"], event["metric"]
            self.results.append((float(event.get("began", at)), at, iterations_in(event)))
        elif name == "trial_added":
            trial.target = None if event["iterations"] is None else trial.iteration + int(event["iterations"])
        elif name in ("trial_started", "resized"):
            trial.why = label_of(cause or event)
        elif name == "resize_failed":
            trial.why = "resize failed"
        elif name in ("resize_started", "suspend_asked"):
            trial.why = label_of(event)
        elif name == "trial_silent":
            trial.state = "silent"  # since its last result
            self._say(at, f"{trial.trial} has not reported for {float(event['seconds']):.0f} s")
        elif name == "trial_ended":
            trial.since, trial.state = at, event["ending"]
            if trial.state == "failed":
                self._say(at, f"{trial.trial} failed")

    def _say(self, at: float, line: str) -> None:
        self.news.append((at, line))


class LogTail:
    """A log that is still written: `new` returns what has come since the last call."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with reading(log):
            self._file = log.open("rb")
        self._part = b""
        self._begun = False
        #: Lines so far that cannot be read, as `read_events` counts them.
        self.dropped = 0

    def new(self, most: int = -1) -> list[EventDict]:
        """The events of the lines that are complete by now. What cannot be read is left out, as by `read_events`.

        ``most``: bytes that are read; -1: all. Raises `EventLogError` if the file is not an event log.
        """
        with reading(self._log):
            *lines, self._part = (self._part + self._file.read(most)).split(b"\n")
        events: list[EventDict] = []
        for line in filter(bytes.strip, lines):
            event = record_of(line)
            if event:
                self._begun = True
                events.append(event)
            elif self._begun or (event is None and may_be_cut(line)):
                self.dropped += 1
            else:
                raise not_a_log(self._log, 1)
        return events

    @property
    def left(self) -> int | None:
        """Bytes that were not read yet. None: the file is another one by now, or begins anew, or is not there."""
        mine, size = os.fstat(self._file.fileno()), self._file.tell()
        try:
            there = os.stat(self._log)
        except OSError:
            return None
        same = (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
        return there.st_size - size if same and there.st_size >= size else None

    def close(self) -> None:
        self._file.close()


def newest_log(run_dir: str | None) -> Path:
    """The event log in ``run_dir``, or the one below it that was written last. None: below Ray's own ~/ray_results.

    Raises `NoEventLogError` if there is none.
    """
    where = results_directory(run_dir)
    logs = logs_in(where)
    if not logs and run_dir is None:
        raise NoEventLogError(f"there is no event log in {str(where)!r}; give the directory of a run")
    return logs[0] if logs else find_log(where)  # whose error says what is missing


def results_directory(where: str | os.PathLike[str] | None) -> Path:
    """The directory that a user means; None: Ray's own ~/ray_results."""
    return Path.home() / "ray_results" if where is None else Path(where)


def logs_in(where: Path) -> list[Path]:
    """The event log in ``where``, or all those of the directories directly in it, the one written last first."""
    try:
        return [find_log(where)]
    except NoEventLogError:
        found: list[tuple[int, Path]] = []
        for log in where.glob(f"*/{EVENT_LOG_NAME}"):
            with suppress(OSError):  # it was deleted a moment ago
                there = log.stat()
                if stat.S_ISREG(there.st_mode):  # to open a pipe would wait for a writer
                    found.append((there.st_mtime_ns, log))
        return [log for _, log in sorted(found, reverse=True)]


def seconds_since(now: float, at: Any) -> float:
    """Seconds from ``at`` to ``now``; 0 if the clock of the machine that wrote ``at`` is ahead."""
    return max(0.0, now - float(at))


def wall_clock(at: float) -> str:
    """The time of day, 14:05:09, where this process runs."""
    return time.strftime("%H:%M:%S", time.localtime(at))
