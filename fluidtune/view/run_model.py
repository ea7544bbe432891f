"""A run as the page shows it: all that has changed since any earlier event, from the events that there are so far.

`RunModel` is pure. What happens to devices and trials is decided in fluidtune/report (occupancy.py, live.py). Here it
is decided what the page gets, in which form, and that it gets nothing twice: each part remembers after which event it
changed last. Times are seconds since the run's first event; docs/view.md has the form.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fluidtune.report.causes import OFTEN, Resizes, label_of, words_of
from fluidtune.report.events import SCHEMA, EventDict, iterations_in
from fluidtune.report.live import LiveRun, LiveTrial

#: Seconds over which iterations are counted, as by `fluidtune top`.
RECENT_S = 60.0
#: A curve has at most this many points: a wide screen has about twice as many pixels in a row.
CURVE_POINTS = 1000
#: Event -> why its trial waits from then on. The event's own reason follows.
WAITS = {
    "trial_added": "new",
    "trial_suspended": "left its devices, to go on later",
    "worker_lost": "its worker died",
    "room_lacking": "its device had no room for it",
}
#: What is sent of `run_started`.
HEAD = ("run", "algorithm", "kind", "metric", "mode", "machine", "fluidtune", "ray", "python", "settings")
#: What an event lacks that this version would read, or has in a form that it does not know.
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError)
#: The columns of the table's rows.
ROW = (
    *("number", "name", "id", "group", "kind", "parameters", "state", "since", "iteration", "target"),
    *("metric", "best", "seconds", "why", "waits", "iterations", "added"),
)


@dataclass
class Row:
    """What the page knows of one trial beyond `LiveTrial`."""

    number: int
    added: float
    #: The event after which it changed last.
    stamp: int = 0
    name: str = ""
    group: str = ""
    kind: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    iterations: int = 0
    best: float | None = None
    waits: str = ""
    #: Of each result its time, iteration, metric (NaN: none) and width, one after the other.
    results: array[float] = field(default_factory=lambda: array("d"))
    #: The places of its intervals in `Replay.intervals`.
    intervals: array[int] = field(default_factory=lambda: array("q"))


class RunModel:
    """The state of one run's page after some of its events."""

    def __init__(self) -> None:
        self.live = LiveRun()
        #: Number of events so far: the stamp of what changed last.
        self.heard = 0
        #: Events that this version does not know, and events that it cannot read.
        self.unknown = self.unreadable = 0
        #: Unix seconds of the first and of the last event.
        self.origin = self.last = 0.0
        self._begun = False
        self.rows: dict[str, Row] = {}
        #: The best value of Tune's metric so far, whenever it changed: seconds and value.
        self.records: list[tuple[float, float]] = []
        #: Trials, those that changed last at the end.
        self._recent: dict[str, None] = {}
        #: The stamp of each interval of `live.use`.
        self._interval_stamps = array("q")
        #: Stamps of marks, and the marks: seconds, device, "grown", "shrunk" or "lost", and why.
        self._mark_stamps = array("q")
        self._marks: list[tuple[float, int, str, str]] = []
        self._resizes = Resizes()
        self._head_at = self._devices_at = self._samples_at = self._news_at = 0
        self._said: object = None

    def hear(self, events: Iterable[EventDict]) -> None:
        """Take in what has happened since the last call. An event that cannot be read is counted and left out."""
        for event in events:
            self.heard += 1
            if event["event"] not in SCHEMA:
                self.unknown += 1
                continue
            try:
                self._step(event)
            except UNREADABLE:
                self.unreadable += 1

    def _step(self, event: EventDict) -> None:
        name, at, trial = event["event"], float(event["t"]), event.get("trial")
        if not isinstance(trial, str | None):
            raise TypeError(f"a trial is {trial!r}")
        if not self._begun:
            self._begun, self.origin = True, at
        self.last = max(self.last, at)
        use = self.live.use
        before = len(use.of(trial).devices) if trial is not None else 0
        cause = self._resizes.step(event) if name not in OFTEN else None
        try:
            self.live.hear([event])
        finally:  # what was heard of a trial before it turned out that the event lacks something
            if trial is not None and trial in self.live.trials and trial not in self.rows:
                self.rows[trial] = Row(len(self.rows), self._seconds(at))
                self._touch(trial, self.rows[trial])
        for place in range(len(self._interval_stamps), len(use.intervals)):
            self._interval_stamps.append(self.heard)
            self.rows[use.intervals[place].trial].intervals.append(place)
        if name == "device_sample":
            self._samples_at = self.heard
        elif name not in OFTEN:
            self._devices_at = self.heard
        if name == "run_started":
            self._driver()
        if self.live.news and self.live.news[-1] is not self._said:
            self._said, self._news_at = self.live.news[-1], self.heard
        if name in ("worker_lost", "device_lost"):
            self._mark(int(event["device"]), "lost", words_of(event) or "")
        elif name == "resized" and event["devices"]:
            grown = len(event["devices"]) >= before
            self._mark(int(event["devices"][0]), "grown" if grown else "shrunk", label_of(cause))
        if isinstance(trial, str) and trial in self.rows:
            self._trial_step(trial, name, event)

    def _driver(self) -> None:
        """A driver began. What an earlier one did with its trials is over."""
        self._head_at = self.heard
        for trial, row in self.rows.items():
            if self.live.trials[trial].state == "waiting":
                row.waits = "its driver ended, and another one goes on"
            self._touch(trial, row)

    def _trial_step(self, trial: str, name: str, event: EventDict) -> None:
        row = self.rows[trial]
        self._touch(trial, row)
        if name in WAITS:
            words = words_of(event)
            row.waits = WAITS[name] + (f": {words}" if words else "")
        if name == "trial_added" and row.results:
            row.waits = "back from a pause"
        if name == "trial_added":
            row.name, row.group, row.kind = str(event.get("name") or ""), str(event["group"]), str(event["kind"])
            found = event.get("parameters")
            row.parameters = found if isinstance(found, dict) else row.parameters
        elif name == "kind_found":
            row.kind = str(event["kind"])
        elif name == "trial_result":
            self._result(row, event)

    def _result(self, row: Row, event: EventDict) -> None:
        metric, mode = event["metric"], self.live.head.get("mode")
        row.iterations += iterations_in(event)
        at = self._seconds(float(event["t"]))
        value = math.nan if metric is None else float(metric)
        row.results.extend((at, float(event["iteration"]), value, float(event["width"])))
        if not math.isfinite(value) or mode not in ("min", "max"):
            return
        better = min if mode == "min" else max
        row.best = value if row.best is None else better(row.best, value)
        if not self.records or better(self.records[-1][1], value) != self.records[-1][1]:
            self.records.append((at, value))

    def _touch(self, trial: str, row: Row) -> None:
        row.stamp = self.heard
        self._recent.pop(trial, None)
        self._recent[trial] = None

    def _mark(self, device: int, kind: str, why: str) -> None:
        self._mark_stamps.append(self.heard)
        self._marks.append((self._seconds(self.last), device, kind, why))

    def _seconds(self, at: float) -> float:
        return round(at - self.origin, 3)

    # --- what the page gets

    def changes(self, since: int = 0) -> dict[str, Any]:
        """What has changed after the first ``since`` events; 0: all there is."""
        live, use = self.live, self.live.use
        found: dict[str, Any] = {
            "whole": since == 0,
            "origin": self.origin,
            "now": self._seconds(self.last),
            "over": use.over,
            "best": live.best,
            "rate": live.ended_since(self.last - RECENT_S),
            "unknown": self.unknown,
            "unreadable": self.unreadable,
            "trials": self._rows(since),
        }
        if since == 0:
            found["columns"] = ROW
        if self._head_at > since:
            found["head"] = {name: live.head.get(name) for name in HEAD}
        if self._devices_at > since:
            found |= self._devices()
        if self._samples_at > since:
            found["samples"] = [
                [device, each.get("utilisation"), each.get("memory_used"), each.get("memory_total")]
                for device, each in sorted(live.samples.items())
            ]
        if self._news_at > since:
            found["news"] = [[self._seconds(at), line] for at, line in live.news]
        if first := self._from(self._mark_stamps, since):
            found["marks"] = self._marks[first - 1 :]
        if first := self._from(self._interval_stamps, since):
            new = use.intervals[first - 1 :]
            found["intervals"] = [
                [self.rows[trial].number for trial, *_ in new],
                [device for _, device, *_ in new],
                [round(share, 4) for _, _, share, *_ in new],
                [self._seconds(start) for *_, start, _ in new],
                [self._seconds(end) for *_, end in new],
            ]
        return found

    @staticmethod
    def _from(stamps: array[int], since: int) -> int:
        """Which of what has these stamps came first after ``since``, counted from 1; 0: none."""
        first = bisect_right(stamps, since)
        return first + 1 if first < len(stamps) else 0

    def _devices(self) -> dict[str, Any]:
        use = self.live.use
        there = {device: self._seconds(since) for device, since in use.there.items()}
        return {
            # Of each device that the run ever had: its machine, since when it is there, and when it was there before.
            "devices": [
                [device, self.live.nodes.get(device, ""), there.get(device), [[*map(self._seconds, s)] for s in spans]]
                for device, spans in sorted(use.available.items())
            ],
            "held": [
                [self.rows[trial].number, held.devices, round(held.share, 4), self._seconds(held.since)]
                for trial, held in use.held.items()
            ],
            "drivers": [self._seconds(start) for start, _ in use.drivers[1:]]
            + ([self._seconds(use.driver_since)] if use.drivers and use.driver_since is not None else []),
        }

    def _rows(self, since: int) -> list[list[Any]]:
        found: list[list[Any]] = []
        for trial in reversed(self._recent):
            row = self.rows[trial]
            if row.stamp <= since:
                break
            found.append(self._row(row, self.live.trials[trial]))
        return found

    def _row(self, row: Row, live: LiveTrial) -> list[Any]:
        waits = row.waits if live.state == "waiting" else ""
        return [
            *(row.number, row.name, live.trial, row.group, row.kind, row.parameters, live.state),
            *(self._seconds(live.since), live.iteration, live.target, live.metric, row.best, live.seconds),
            *(live.why, waits, row.iterations, row.added),
        ]

    def curve(self, trial: str) -> dict[str, list[Any]]:
        """The trial's results as columns, at most `CURVE_POINTS` of them, and its width whenever that changed.

        Raises KeyError if there is no such trial.
        """
        results = self.rows[trial].results
        count = len(results) // 4
        every = -(-count // CURVE_POINTS) or 1
        # The last result is always among them.
        picked = range((count - 1) % every if count else 0, count, every)
        columns = [[results[4 * place + column] for place in picked] for column in range(4)]
        seconds, iterations, metrics, _ = columns
        values = [None if math.isnan(value) else value for value in metrics]
        return {"seconds": seconds, "iterations": iterations, "metric": values, "widths": self._widths(trial)}

    def _widths(self, trial: str) -> list[list[float]]:
        """When the trial's width became what it is from then on: seconds, and the width in devices."""
        use = self.live.use
        spans: dict[tuple[float, float], float] = {}
        for place in self.rows[trial].intervals:
            _, _, share, *span = use.intervals[place]
            key = (span[0], span[1])
            spans[key] = spans.get(key, 0.0) + share
        held = use.of(trial)
        if held.devices:
            spans[held.since, math.inf] = held.width
        steps: list[list[float]] = []
        until = 0.0
        for (start, end), width in sorted(spans.items()):
            if steps and start > until:
                steps.append([self._seconds(until), 0.0])
            if not steps or steps[-1][1] != round(width, 4):
                steps.append([self._seconds(start), round(width, 4)])
            until = end
        return steps if until == math.inf or not steps else [*steps, [self._seconds(until), 0.0]]

    def glance(self) -> dict[str, Any]:
        """The run in a few figures, to stand beside other runs."""
        use, head = self.live.use, self.live.head
        held = sum(each.share * (each.end - each.start) for each in use.intervals)
        held += sum(each.width * max(0.0, use.now - each.since) for each in use.held.values())
        there = sum(end - start for spans in use.available.values() for start, end in spans)
        there += sum(max(0.0, use.now - since) for since in use.there.values())
        every = -(-len(self.records) // CURVE_POINTS) or 1
        return {
            **{name: head.get(name) for name in ("run", "algorithm", "kind", "metric", "mode")},
            "origin": self.origin,
            "seconds": self._seconds(self.last),
            "over": use.over,
            "trials": len(self.rows),
            "states": dict(self.live.states),
            "iterations": sum(row.iterations for row in self.rows.values()),
            "devices": len(use.available),
            "use": min(1.0, held / there) if there > 0 else 0.0,
            "best": self.live.best,
            "records": [*self.records[::every], *self.records[-1:]],
        }
