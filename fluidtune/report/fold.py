"""The fold of an event log: who held which devices when, what each trial did, and all other events in order.

`Holdings` is the state that decides what an event means for devices. `Fold` adds the tables: spans, iterations and
notes. Both take one event after the other by `step`, so that a finished log and one that grows are read alike, and a
torn line is left out before it comes here (`events.record_of`). The summary, the stories, the pictures, the page and
`fluidtune plan` are queries on the tables. docs/events.md draws them. Pure: no clock, no files, neither Ray nor torch.
"""

from __future__ import annotations

import math
import os
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluidtune.report.events import EventDict, Events, read_events
from fluidtune.report.run_logs import find_log
from fluidtune.report.schema import SCHEMA

#: Events that take devices from trials, whichever trial they name.
BREAKS = ("run_started", "worker_lost", "device_lost", "device_returned")
#: How many colours pictures have for trials: that many differ for everybody who sees colours.
COLOUR_COUNT = 60
#: Event -> the state of its trial after it. After `trial_ended` it is the event's ending.
STATES = {
    **dict.fromkeys(("trial_added", "trial_suspended", "room_lacking"), "waiting"),
    **dict.fromkeys(("trial_started", "trial_result", "resized", "resize_failed"), "running"),
    "resize_started": "resizing",
    "trial_silent": "silent",
}


class Span(NamedTuple):
    """A trial held ``share`` of each of ``devices``, 0 < share <= 1, from ``start`` to ``end`` (unix seconds).

    ``first`` and ``last``: the numbers of the events with which it began and ended. The end of an open one is infinite.
    """

    trial: str
    devices: tuple[int, ...]
    share: float
    start: float
    first: int
    end: float = math.inf
    last: int = -1

    @property
    def width(self) -> float:
        """In devices."""
        return self.share * len(self.devices)


#: What a trial holds that holds nothing.
NOTHING = Span("", (), 0.0, 0.0, -1)


class Resize(NamedTuple):
    """A resize that was done: what the trial held before it and after it."""

    before: Span
    after: Span

    @property
    def grown(self) -> bool:
        """Whether the trial has at least as many devices as before."""
        return len(self.after.devices) >= len(self.before.devices)


class Restore(NamedTuple):
    """Another driver goes on, ``seconds`` after the one before it ended or wrote last. ``died``: it did not end."""

    seconds: float
    died: bool


class Note(NamedTuple):
    """An event that is no iteration and no sample.

    ``number``: its place in the log, from 1 on. ``at``: unix seconds, which never go back. ``cause``: of the end of a
    resize, the event that says why, if one does. ``before``: what its trial held. ``again``: of a `went_on`, how many
    iterations are done twice.
    """

    number: int
    at: float
    event: EventDict
    before: Span = NOTHING
    cause: EventDict | None = None
    resize: Resize | None = None
    restore: Restore | None = None
    again: int = 0

    @property
    def name(self) -> str:
        return str(self.event["event"])


class Iteration(NamedTuple):
    """A line of iterations: the last one's ``iteration``, and ``times`` iterations of ``seconds`` each in the mean.

    ``began`` and ``at``: begin of the first and end of the last one, unix seconds. ``metric``: NaN: none. ``number``:
    the event's place in the log.
    """

    number: float
    at: float
    iteration: float
    seconds: float
    width: float
    metric: float
    times: float
    began: float


@dataclass
class Trial:
    """What the log says of one trial. Times are unix seconds."""

    trial: str
    #: Its place among the trials, from 0 on, and when the log named it first.
    place: int
    added: float
    #: When it last reported or changed its state, and the number of the last event that named it.
    since: float
    stamp: int = 0
    #: "waiting", "running", "resizing", "silent"; once Tune has paused or ended it "paused", "stopped" or "failed".
    state: str = "waiting"
    name: str = ""
    group: str = ""
    kind: str = ""
    #: The number of its colour: no trial that held devices when it first did has that one.
    colour: int = 0
    #: Whether it can have several workers.
    growable: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    #: Its last iteration, the last one of its budget (None: unknown), and how many it has reported.
    iteration: int = 0
    target: int | None = None
    iterations: int = 0
    #: Seconds and metric of its last iteration, and its best metric.
    seconds: float | None = None
    metric: float | None = None
    best: float | None = None
    #: Its last iteration when its driver ended, until it has gone on; else 0.
    stood: int = 0
    #: The largest number of an iteration so far.
    most: int = 0
    #: The `resize_started` of its resize that has not ended.
    resizing: EventDict | None = None
    notes: list[Note] = field(default_factory=list)
    #: Its spans that have ended.
    spans: list[Span] = field(default_factory=list)
    #: The rows of `lines`, one after the other.
    rows: array[float] = field(default_factory=lambda: array("d"))

    @property
    def sort(self) -> str:
        """Its kind, for people: one that keeps nothing and can grow is more than "plain"."""
        return "growable" if self.kind == "plain" and self.growable else self.kind

    @property
    def line_count(self) -> int:
        """How many lines of iterations it has."""
        return len(self.rows) // len(Iteration._fields)

    def line(self, place: int) -> Iteration:
        """Its line of iterations at this place."""
        wide = len(Iteration._fields)
        return Iteration(*self.rows[place * wide : (place + 1) * wide])

    def lines(self) -> Iterator[Iteration]:
        """Its lines of iterations, oldest first."""
        return map(Iteration._make, zip(*[iter(self.rows)] * len(Iteration._fields), strict=True))

    def noted(self, *names: str) -> list[Note]:
        """Its notes with these names."""
        return [note for note in self.notes if note.name in names]


class Holdings:
    """Which devices are there, and which trial holds which of them, after some of the events."""

    def __init__(self) -> None:
        #: Events so far, and the time of the last one in unix seconds. A clock that is set back does not change it.
        self.heard, self.now = 0, 0.0
        #: The spans in which a driver ran, of those that have ended: one, and one more for each restore.
        self.drivers: list[tuple[float, float]] = []
        #: When the present driver began; None before the first event and after run_ended.
        self.driver_since: float | None = None
        #: Whether run_ended came and no run_started after it.
        self.over = False
        #: device -> the time since which the run has it; its spans in which the run had it before; its machine.
        self.there: dict[int, float] = {}
        self.available: dict[int, list[tuple[float, float]]] = {}
        self.nodes: dict[int, str] = {}
        #: What each trial holds; a trial that holds nothing is not in it.
        self.held: dict[str, Span] = {}
        #: Trials on a device where a worker died. Their release clears the mark.
        self.hurt: set[str] = set()
        #: Resizes that were done.
        self.resizes = 0
        #: Spans that have ended, in the order of their ends.
        self.spans: list[Span] = []

    def of(self, trial: str) -> Span:
        """What the trial holds; `NOTHING` if it holds none."""
        return self.held.get(trial, NOTHING)

    @property
    def busy(self) -> set[int]:
        """The devices that a trial holds."""
        return {device for held in self.held.values() for device in held.devices}

    def holders(self, *devices: int) -> list[str]:
        """The trials that hold one of the devices."""
        return [trial for trial, held in self.held.items() if any(device in held.devices for device in devices)]

    def step(self, event: EventDict) -> Any:
        """Take in the next event of the log."""
        name = event["event"]
        trial: Any = event.get("trial")
        self.resizes += name == "resized"
        before, self.heard, self.now = self.now, self.heard + 1, max(self.now, float(event["t"]))
        if name == "run_started":
            self._finish_driver(before)
            self.driver_since, self.over = self.now, False
            for device in event["devices"]:
                self._gain(int(device["device"]), self.now, str(device["node"]))
        if self.over:
            return  # workers that end after run_ended use no trial's time
        if self.driver_since is None:
            self.driver_since = self.now
        if name == "trial_started":
            self._make_room(event["devices"], event["share"])
            self._hold(trial, event["devices"], event["share"])
        elif name == "resized" or (
            name == "resize_failed" and self.of(trial).devices not in ((), tuple(event["devices"]))
        ):
            held = self.of(trial)
            self._hold(trial, event["devices"], held.share if tuple(event["devices"]) == held.devices else 1.0)
        elif name in ("trial_ended", "trial_suspended"):
            self._release(trial)
        elif name == "worker_lost":
            self.hurt.update(self.holders(event["device"]))
        elif name == "recovered" and trial in self.hurt:
            self._release(trial)
        elif name == "device_gained":
            self._gain(int(event["device"]), self.now, str(event["node"]))
        elif name in ("device_lost", "device_returned"):
            for each in self.holders(int(event["device"])):
                self._release(each)
            self._lose(int(event["device"]), self.now)
        elif name == "run_ended":
            self._finish_driver(self.now)
            self.over = True

    def _finish_driver(self, at: float) -> None:
        """The driver ended at ``at``, and with it everything that it held."""
        if self.driver_since is None:
            return
        for trial in list(self.held):
            self._release(trial, at)
        for device in list(self.there):
            self._lose(device, at)
        self.drivers.append((self.driver_since, at))
        self.driver_since = None

    def _gain(self, device: int, at: float, node: str) -> None:
        self.nodes[device] = node
        self.available.setdefault(device, [])
        self.there.setdefault(device, at)

    def _lose(self, device: int, at: float) -> None:
        since = self.there.pop(device, at)
        if at > since:
            self.available[device].append((since, at))

    def _hold(self, trial: str, devices: Sequence[int], share: float) -> None:
        self._release(trial)
        if not devices or share <= 0:
            return
        for device in devices:
            if device not in self.available:
                # No event announced the device because the log's first lines are missing: it was there from the start.
                assert self.driver_since is not None
                self._gain(device, self.driver_since, "")
        self.held[trial] = Span(trial, tuple(devices), min(float(share), 1.0), self.now, self.heard)

    def _release(self, trial: str, at: float | None = None) -> None:
        self.hurt.discard(trial)
        held = self.held.pop(trial, None)
        if held is not None:
            self._ended(held._replace(end=self.now if at is None else at, last=self.heard))

    def _ended(self, span: Span) -> None:
        self.spans.append(span)

    def _make_room(self, devices: Sequence[int], share: float) -> None:
        """A trial starts at ``share`` of ``devices``: no trial there holds more than ``share`` from now on."""
        for trial in self.holders(*devices):
            if self.held[trial].share > share > 0:
                self._hold(trial, self.held[trial].devices, share)


class Fold(Holdings):
    """A run after some of its events."""

    def __init__(self, events: Iterable[EventDict] = (), dropped: int = 0) -> None:
        super().__init__()
        #: Events that this version does not know, and lines of the log that were left out.
        self.unknown, self.dropped = 0, dropped
        #: The time of the first event, unix seconds.
        self.origin = 0.0
        #: The run_started of the last driver, empty if there is none, and its number. The number of the last sample.
        self.head: EventDict = {}
        self.began = self.sampled = 0
        self.trials: dict[str, Trial] = {}
        #: Trials, those that changed last at the end.
        self.recent: dict[str, None] = {}
        self.notes: list[Note] = []
        #: Those of drivers that began, and of workers and devices that went.
        self.breaks: list[Note] = []
        #: Event name -> number of such events.
        self.counts: Counter[str] = Counter()
        #: device -> its samples: unix seconds, utilisation (None: unknown), bytes of memory in use, and of all.
        self.samples: dict[int, list[tuple[float, float | None, float, float]]] = {}
        #: The best value of Tune's metric so far, whenever it changed: unix seconds and value.
        self.records: list[tuple[float, float]] = []
        #: Most devices at one moment, and since when (unix seconds) there was an idle one or not, and how many waited.
        self.most_devices = 0
        self.load: list[tuple[float, bool, int]] = []
        #: Waiting trial -> its line of the queue, once the log has said it -> why the line's trials wait, in words.
        self._waiting: dict[str, int | None] = {}
        self._why_of_line: dict[int, str] = {}
        #: device -> its spans that have ended.
        self._on: dict[int, list[Span]] = defaultdict(list)
        for event in events:
            self.step(event)

    def step(self, event: EventDict) -> Note | None:
        """Take in the next event. Returns its note, if it has one."""
        name = event["event"]
        trial: Any = event.get("trial")
        self.origin = self.origin if self.heard else float(event["t"])
        if name not in SCHEMA:
            self.heard, self.unknown = self.heard + 1, self.unknown + 1
            return None
        its = self._trial(trial, float(event["t"])) if isinstance(trial, str) else None
        held = self.of(trial) if its is not None else NOTHING
        over = self.over
        super().step(event)
        self.counts[name] += 1
        ids = self._wait(event) if name == "trial_waits" else [trial, event.get("clone") if name == "steered" else None]
        named = {each: self._trial(each, self.now) for each in ids if isinstance(each, str)}
        for each in named.values():
            each.stamp = self.heard
            self.recent[each.trial] = self.recent.pop(each.trial, None)
        if name == "trial_result":
            assert its is not None
            self._iteration(its, event)
            return None
        if name == "device_sample":
            sample = (float(event["t"]), event["utilisation"], event["memory_used"], event["memory_total"])
            self.samples.setdefault(int(event["device"]), []).append(sample)
            self.sampled = self.heard
            return None
        note = Note(self.heard, self.now, event, held)
        if its is not None:
            note = self._of_a_trial(its, note)
        elif name == "run_started":
            self._driver(event)
            if self.drivers:
                note = note._replace(restore=Restore(self.now - self.drivers[-1][1], not over))
        self.notes.append(note)
        if name in BREAKS:
            self.breaks.append(note)
        for each in named.values():
            each.notes.append(note)
        self._weigh(name, trial)
        return note

    def _trial(self, trial: str, at: float) -> Trial:
        place = len(self.trials)
        new = Trial(trial, place, at, at, colour=place % COLOUR_COUNT)
        return self.trials.get(trial) or self.trials.setdefault(trial, new)

    def _ended(self, span: Span) -> None:
        super()._ended(span)
        for device in span.devices:
            self._on[device].append(span)
        self._trial(span.trial, span.start).spans.append(span)

    def _driver(self, event: EventDict) -> None:
        for trial in self.trials.values():
            trial.resizing, trial.stamp, trial.stood = None, self.heard, trial.iteration
            if trial.state in ("running", "resizing", "silent"):
                trial.state = "waiting"
        self.head, self.began = event, self.heard
        self._waiting.clear()
        self._why_of_line.clear()

    def _iteration(self, trial: Trial, event: EventDict) -> None:
        at, times, metric = float(event["t"]), int(event.get("iterations") or 1), event["metric"]
        trial.since, trial.state = at, "running"
        trial.iteration, trial.seconds, trial.metric = int(event["iteration"]), event["seconds"], metric
        counted, trial.most = trial.most, max(trial.most, trial.iteration)
        if event.get("kept") and trial.iteration <= counted:
            return  # the driver that died had written it down
        trial.iterations += times
        if trial.target is not None and trial.iteration > trial.target:
            trial.target = None  # Tune has raised it, and does not say how far
        began = float(event.get("began", at - event["seconds"] * times))
        value = math.nan if metric is None else float(metric)
        row = (self.heard, at, event["iteration"], event["seconds"], event["width"], value, times, began)
        trial.rows.extend(map(float, row))
        mode = self.head.get("mode")
        if mode not in ("min", "max") or math.isnan(value):
            return
        better = min if mode == "min" else max
        trial.best = value if trial.best is None else better(trial.best, value)
        if not self.records or better(self.records[-1][1], value) != self.records[-1][1]:
            self.records.append((at, value))

    def _of_a_trial(self, trial: Trial, note: Note) -> Note:
        name, event = note.name, note.event
        if name in STATES:
            trial.state = STATES[name]
            trial.since = trial.since if name == "trial_silent" else float(event["t"])
        if name == "trial_added":
            trial.name, trial.group, trial.kind = str(event.get("name") or ""), event["group"], event["kind"]
            found = event.get("parameters")
            trial.parameters = found if isinstance(found, dict) else trial.parameters
            trial.growable = trial.growable or bool(event.get("growable"))
            trial.target = None if event["iterations"] is None else trial.iteration + int(event["iterations"])
        elif name == "kind_found":
            trial.kind = event["kind"]
        elif name == "can_grow":
            trial.growable = True
        elif name == "trial_started" and not trial.spans:
            taken = {self.trials[other].colour for other in self.held if other != trial.trial}
            numbers = range(trial.place, trial.place + COLOUR_COUNT)
            trial.colour = next((n % COLOUR_COUNT for n in numbers if n % COLOUR_COUNT not in taken), trial.colour)
        elif name == "trial_ended":
            trial.since, trial.state = float(event["t"]), event["ending"]
        elif name == "went_on":
            note = note._replace(again=max(0, max(trial.stood, event["reported"]) - event["iteration"]))
            trial.stood = 0
        if name == "resize_started":
            trial.resizing = event
        elif name in ("resized", "resize_failed", "trial_started", "trial_ended", "trial_suspended"):
            begun, trial.resizing = trial.resizing, None
            if name in ("resized", "resize_failed"):
                note = note._replace(cause=event if name == "resized" and event.get("reason") else begun)
            if name == "resized":
                after = self.held.get(trial.trial) or Span(trial.trial, tuple(event["devices"]), 1.0, self.now, -1)
                note = note._replace(resize=Resize(note.before, after))
        return note

    def _weigh(self, name: str, trial: Any) -> None:
        """Note the devices that are there, whether one is idle, and how many trials wait."""
        if name in ("trial_added", "trial_suspended"):
            self._waiting[trial] = None
        elif name in ("trial_started", "trial_ended"):
            self._waiting.pop(trial, None)
        self.most_devices = max(self.most_devices, len(self.there))
        load = (self.now, bool(self.there.keys() - self.busy), len(self._waiting))
        if not self.load or self.load[-1][1:] != load[1:]:
            self.load.append(load)

    def _wait(self, event: EventDict) -> list[str]:
        """Take in a `trial_waits`. Returns the trials of the line to which it says something new."""
        line, came, before = event["line"], event["trials"], self._why_of_line.get(event["line"])
        self._waiting.update(dict.fromkeys(came, line))
        self._why_of_line[line] = event["reason"]
        return came if event["reason"] == before else [trial for trial, its in self._waiting.items() if its == line]

    # --- queries

    def last_driver(self) -> tuple[EventDict, bool]:
        """What `driver_state` asks of the log: the last `run_started`, and whether `run_ended` came after it."""
        return self.head, self.over

    def noted(self, *names: str) -> list[Note]:
        """The notes with these names."""
        return [note for note in self.notes if note.name in names]

    def since(self, number: int) -> list[Note]:
        """The notes of the events after the first ``number``."""
        return self.notes[self._place(number + 1) :]

    def _place(self, number: int) -> int:
        return bisect_left(self.notes, number, key=lambda note: note.number)

    def note(self, number: int) -> Note:
        """The note of the event with this number."""
        return self.notes[self._place(number)]

    def on(self, device: int) -> list[Span]:
        """The spans on a device."""
        return [*self._on[device], *(self.held[trial] for trial in self.holders(device))]

    def spans_of(self, trial: str) -> list[Span]:
        """The trial's spans, the open one at the end."""
        return [*self.trials[trial].spans, *filter(None, [self.held.get(trial)])]

    def lines(self) -> Iterator[tuple[Trial, Iteration]]:
        """All lines of iterations, trial by trial."""
        return ((trial, line) for trial in self.trials.values() for line in trial.lines())


#: A run as readers take it: its fold, its events, or the path of its event log or directory.
Run = Fold | Iterable[EventDict] | str | os.PathLike[str]


def fold_of(run: Run) -> Fold:
    """The fold of the run.

    Raises `NoEventLogError` if there is no log, and `EventLogError` if it is not an event log or may not be read.
    """
    if isinstance(run, Fold):
        return run
    events = read_events(find_log(run)) if isinstance(run, (str, os.PathLike)) else run
    return Fold(events, events.dropped if isinstance(events, Events) else 0)
