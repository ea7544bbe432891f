"""The event log: what one experiment's driver writes down, one JSON object a line, and how it is read back.

This module decides which events exist, which fields each must carry and how a value becomes JSON; and that a
driver killed at any instant costs at most the line it was writing. It does not decide when something is
worth an event (the shell does), and draws no conclusions from events (occupancy.py and summary.py do).
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

#: The event log's file name in a run's directory.
EVENT_LOG_NAME = "fluid_events.jsonl"

#: One event as read back: "t" (unix seconds), "event" (its name) and the event's own fields.
EventDict = dict[str, Any]


@dataclass(frozen=True)
class EventSchema:
    """What one event means and carries; each field's name leads to what it is, with its unit."""

    meaning: str
    required: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)


_TRIAL = "the trial's id"
_DEVICES = "list of device numbers"

#: Every event there is. docs/events.md is held equal to this by a test. A field "or null" must be there and
#: may be null.
SCHEMA: dict[str, EventSchema] = {
    "run_started": EventSchema(
        "A driver begins, or goes on with, the experiment. A second one in a file is a restored experiment:"
        " what the first driver held ended with its last event.",
        {
            "run": "the experiment's name",
            "ray": "Ray's version",
            "fluidtune": "FluidTune's version",
            "python": "Python's version",
            "machine": "the machine in words",
            "kind": '"gpu", "cpu" or "emulated"',
            "devices": 'the devices at the start, a list of {"device": number, "node": string}',
            "settings": "the executor's settings, an object",
            "algorithm": "the search algorithm or scheduler in words",
            "metric": "the metric's name, or null",
            "mode": '"min" or "max", or null',
        },
    ),
    "device_gained": EventSchema(
        "A device can be used from now on. Said again of a device that is there, it changes nothing.",
        {"device": "device number", "node": "its machine"},
    ),
    "device_lost": EventSchema(
        "A device is gone; a trial that held it holds nothing, on any device, until it is started or resized again.",
        {"device": "device number"},
        {"reason": "why, in words"},
    ),
    "device_sample": EventSchema(
        "What NVML says of a GPU, every few seconds while trials iterate on it. Never without a driver.",
        {
            "device": "device number",
            "utilisation": "part of the last moment in which a kernel ran, 0 to 1, or null (MIG)",
            "memory_used": "bytes",
            "memory_total": "bytes",
            "processes": "bytes by process id, an object; empty where the driver does not tell",
        },
        {
            "index": "NVML's number of it",
            "uuid": "NVML's id",
            "name": "what it is",
            "mig": "true if it is divided by MIG",
            "driver": "the driver's version, or null",
        },
    ),
    "group_announced": EventSchema(
        "A TrialGroup exists.",
        {
            "group": "the group's id",
            "synchronous": "true for a batch whose makespan counts",
            "algorithm": "what made the group, in words",
        },
        {"concurrency": "most trials of the group at once, or null"},
    ),
    "trial_added": EventSchema(
        "Tune wants this trial to run: a new one, a promoted one, or one that was paused.",
        {
            "trial": _TRIAL,
            "group": "its group's id",
            "kind": '"plain", "checkpointing" or "elastic"',
            "iterations": "iterations left in its budget, or null when nobody knows",
        },
        {"share": "what the script asked for of one device, or a number of devices"},
    ),
    "kind_found": EventSchema(
        "What the trial turned out to be, found while it ran.",
        {"trial": _TRIAL, "kind": '"plain", "checkpointing" or "elastic"'},
    ),
    "trial_started": EventSchema(
        "The trial holds these devices from now on, and nothing else that it held before.",
        {
            "trial": _TRIAL,
            "devices": _DEVICES,
            "share": "its part of each of them: 1, or 1/p when packed",
            "resumed": "true when it continues from a commit or checkpoint",
        },
    ),
    "trial_result": EventSchema(
        "One iteration was done.",
        {
            "trial": _TRIAL,
            "iteration": "which, counted by the trial",
            "seconds": "how long it took, s",
            "width": "the width that it really ran at, in devices",
            "metric": "the metric's value, or null",
        },
        {"memory": "with lanes: parts of a device's memory that it needs, [persistent, ephemeral], as measured"},
    ),
    "trial_silent": EventSchema(
        "The trial has not reported for much longer than its iterations took before. It keeps its devices.",
        {
            "trial": _TRIAL,
            "seconds": "since its iteration was asked for, s",
            "usual": "its longest iteration so far, s, or null before the first of the job",
        },
    ),
    "resize_started": EventSchema(
        "The trial was told to change its workers; it holds devices_from until `resized`.",
        {
            "trial": _TRIAL,
            "devices_from": _DEVICES,
            "devices_to": _DEVICES,
            "reason": "why, in words",
        },
    ),
    "resized": EventSchema(
        "The trial holds these devices from now on, and nothing else.",
        {"trial": _TRIAL, "devices": _DEVICES, "seconds": "the pause that it cost the trial, s"},
        {"share": "its part of each device; without it 1, or as before where the devices did not change"},
    ),
    "resize_failed": EventSchema(
        "The resize could not be done; the trial goes on with these devices.",
        {"trial": _TRIAL, "devices": _DEVICES, "reason": "why, in words"},
    ),
    "trial_suspended": EventSchema(
        "The trial is off its devices at a commit, and will be started again.",
        {"trial": _TRIAL},
    ),
    "trial_ended": EventSchema(
        "Tune let go of the trial: what it held is free. A paused trial comes back with `trial_added`.",
        {"trial": _TRIAL, "ending": '"paused", "stopped" or "failed"'},
        {"reason": "why, in words"},
    ),
    "worker_started": EventSchema(
        "A worker process is ready.",
        {
            "worker": "the worker's id",
            "device": "device number",
            "pid": "its process id",
            "seconds": "from asking for it until it was ready, s",
        },
        {"mps": "with lanes on GPUs: true if it is a client of MPS, false if it takes time slices"},
    ),
    "worker_lost": EventSchema(
        "A worker process died; its device did not. With `trial`, that trial holds nothing from now until it"
        " is started again; without, a trial on that device holds it until `recovered` or its next"
        " `trial_started`.",
        {"worker": "the worker's id", "device": "device number", "reason": "why, in words"},
        {"trial": "the trial that it worked for"},
    ),
    "worker_replaced": EventSchema(
        "A new worker process stands in for one that died or was discarded.",
        {"worker": "the worker's id", "device": "device number", "reason": "why, in words"},
    ),
    "recovered": EventSchema(
        "After a loss the trial goes on from its last commit.",
        {
            "trial": _TRIAL,
            "iteration": "the last iteration in that commit",
            "reason": "what was lost, in words",
        },
    ),
    "room_lacking": EventSchema(
        "With lanes: the memory of the trial's device has no room for it; it goes back to the queue.",
        {
            "trial": _TRIAL,
            "device": "device number",
            "memory": "parts of a device's memory that it needs, [persistent, ephemeral], or null where nobody knows",
            "reason": "why, in words",
        },
    ),
    "run_ended": EventSchema(
        "The experiment is over.",
        {
            "seconds": "this driver's time from run_started, s",
            "trials": "how many trials there were",
            "best": 'the best trial, {"trial": id, "metric": value}, or null',
        },
    ),
}


class EventLogError(ValueError):
    """An event that the schema does not know, or a file that is no event log."""


def check_event(event: str, fields: Mapping[str, Any]) -> None:
    """Raise `EventLogError` unless ``event`` exists and ``fields`` are what it must and may carry."""
    schema = SCHEMA.get(event)
    if schema is None:
        raise EventLogError(f"unknown event {event!r}; the events are {', '.join(sorted(SCHEMA))}")
    missing = [name for name in schema.required if name not in fields]
    if missing:
        required = ", ".join(schema.required)
        raise EventLogError(f"event {event!r} lacks {', '.join(missing)}; it must carry {required}")
    unknown = [name for name in fields if name not in schema.required and name not in schema.optional]
    if unknown:
        allowed = ", ".join([*schema.required, *schema.optional])
        raise EventLogError(f"event {event!r} has no field {', '.join(unknown)}; its fields are {allowed}")


def _plain(value: Any) -> Any:
    """``value`` as what JSON can say: non-finite numbers become None, what JSON has no word for its str()."""
    if value is None or isinstance(value, (str, bool)):
        return value
    # Numbers by their abstract kind, so that Fraction widths and numpy scalars need no case of their own.
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        if getattr(value, "shape", None) == ():  # a 0-d array or tensor says it can be iterated, and cannot
            return _plain(value.item())  # type: ignore[attr-defined]
        return [_plain(item) for item in value]
    if hasattr(value, "item") and callable(value.item):  # numpy.bool_ and other scalars that are no Real
        return _plain(value.item())
    return str(value)


class EventLog:
    """Appends events to one JSONL file; safe to call from several threads of one process.

    ``path``: the file; its directory is made when it is not there, and an existing log is continued.
    ``clock``: gives unix seconds; the twin hands in its virtual clock.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.time) -> None:
        #: Where the log is.
        self.path = Path(path)
        self._clock = clock
        self._lock = threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND and no buffer of our own: a line is with the kernel when write() returns, so that killing
        # the driver cannot take back a line that was written.
        self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end_cut_line()

    def _end_cut_line(self) -> None:
        # A driver that was killed inside a line left no newline; ours must not be glued to what it left.
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def write(self, event: str, /, **fields: Any) -> None:
        """Append one event, now. Raises `EventLogError` where the schema does not allow it."""
        check_event(event, fields)
        plain = {name: _plain(value) for name, value in fields.items()}
        with self._lock:
            if self._fd is None:
                raise EventLogError(f"the event log {self.path} is closed; {event!r} was not written")
            # The time is taken under the lock, so that lines are in the order of their times.
            record = {"t": float(self._clock()), "event": event, **plain}
            left = (json.dumps(record, allow_nan=False, separators=(", ", ": ")) + "\n").encode()
            while left:  # write() may take only a part, on a full disk for example
                left = left[os.write(self._fd, left) :]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Events(list[EventDict]):
    """The events of one log, in the order of the file, and how many lines could not be read.

    ``dropped``: broken lines; 1 for a driver that was killed while it wrote, 0 otherwise.
    """

    def __init__(self, events: Iterable[EventDict] = (), dropped: int = 0) -> None:
        super().__init__(events)
        self.dropped = dropped


def read_events(path: str | os.PathLike[str]) -> Events:
    """The events of the log at ``path``; an empty file has none.

    A line that is no whole JSON object is dropped and counted in `Events.dropped`: it is what a killed driver
    left at the end, or, in a restored experiment, before the next ``run_started``. An event that this version
    does not know is kept, so that a newer log can be read.
    Raises FileNotFoundError, and `EventLogError` for a file that is not an event log.
    """
    path = Path(path)
    events: list[EventDict] = []
    dropped = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:  # JSON's own error, or bytes that are no UTF-8
                # All that a killed driver can leave of a first line still begins as we begin a line.
                if not events and not (line.startswith(b'{"t": ') or b'{"t": '.startswith(line)):
                    raise _not_a_log(path, number) from None
                dropped += 1
                continue
            if not (
                isinstance(record, dict)
                and isinstance(record.get("event"), str)
                and isinstance(record.get("t"), (int, float))
            ):
                raise _not_a_log(path, number)
            events.append(record)
    return Events(events, dropped)


def _not_a_log(path: Path, number: int) -> EventLogError:
    return EventLogError(
        f'{path} is not a FluidTune event log: line {number} is no {{"t": seconds, "event": name, ...}};'
        f" expected the {EVENT_LOG_NAME} of a run's directory"
    )


def load(events_or_path: Iterable[EventDict] | str | os.PathLike[str]) -> Events:
    """Events as they are, or those of a log, or of the log in a run's directory."""
    if isinstance(events_or_path, Events):
        return events_or_path
    if isinstance(events_or_path, (str, os.PathLike)):
        return read_events(find_log(events_or_path))
    return Events(events_or_path)


def find_log(run_dir_or_log: str | os.PathLike[str]) -> Path:
    """The event log itself, given it or its run's directory. Raises FileNotFoundError where there is none."""
    path = Path(run_dir_or_log)
    log = path / EVENT_LOG_NAME if path.is_dir() else path
    if not log.is_file():
        raise FileNotFoundError(
            f"no event log at {log}; expected a run's directory with {EVENT_LOG_NAME} in it, or that file"
        )
    return log


def schema_markdown() -> str:
    """The schema as the Markdown that docs/events.md holds."""
    parts = []
    for event, schema in SCHEMA.items():
        rows = [f"| `{name}` | {text} |" for name, text in schema.required.items()]
        rows += [f"| `{name}` (optional) | {text} |" for name, text in schema.optional.items()]
        head = [f"### {event}", "", schema.meaning, "", "| field | what it is |", "|---|---|"]
        parts.append("\n".join(head + rows))
    return "\n\n".join(parts) + "\n"
