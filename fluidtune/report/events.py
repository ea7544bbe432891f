"""The event log of one experiment: one JSON object per line, written by the driver and read back by the report.

This module decides which events exist, which fields each must and may carry, and how a value becomes JSON. A driver
that is killed at any instant loses at most the line that it was writing. This module does not decide when an event is
written (fluidtune/tune does) and draws no conclusions from events (occupancy.py and summary.py do).
"""

from __future__ import annotations

import json
import math
import os
import platform
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from fluidtune.errors import FluidTuneError
from fluidtune.report.event_schema import TRIAL, EventSchema
from fluidtune.report.serving_events import SERVING

#: The event log's file name in a run's directory.
EVENT_LOG_NAME = "fluid_events.jsonl"

#: One event as read back: "t" (unix seconds), "event" (its name) and the event's own fields.
EventDict = dict[str, Any]


def this_machine() -> str:
    """This machine in words, for the field ``machine`` of a log's first event."""
    return f"{platform.node()}, {os.cpu_count()} cores"


_DEVICES = "list of device numbers"
_REASON = "why, in words"
#: Fields of events that carry a reason of the engine. Logs of earlier versions have no such fields.
_WHY = {
    "why": 'the reason\'s name in docs/engine.md, such as "waiting_trials"',
    "numbers": "the numbers that decided, an object; docs/engine.md has their names",
}

#: Every event. A test holds docs/events.md equal to this. A field described with "or null" must be present, and its
#: value may be null.
SCHEMA: dict[str, EventSchema] = {
    "run_started": EventSchema(
        "A driver begins the experiment, or continues it after `Tuner.restore`. With a second `run_started` in a file,"
        " everything that the first driver held ended with that driver's last event.",
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
            "metric": "the name of Tune's metric, or null",
            "mode": '"min" or "max", or null',
        },
    ),
    "device_gained": EventSchema(
        "The job has this device from now on. For a device that it has already, the event changes nothing.",
        {"device": "device number", "node": "the machine that the device is in"},
    ),
    "device_lost": EventSchema(
        "The job no longer has this device. A trial that held it holds no device at all until its next `trial_started`"
        " or `resized`.",
        {"device": "device number"},
        {"reason": _REASON},
    ),
    "device_returned": EventSchema(
        "The job has given this device back, because it had no use for it or because others waited for it. The job no"
        " longer has it, as after a `device_lost`.",
        {"device": "device number"},
    ),
    "device_sample": EventSchema(
        "NVML's measurements of a GPU, taken every few seconds while trials iterate on it. Without NVIDIA's driver"
        " there are none.",
        {
            "device": "device number",
            "utilisation": "part of NVML's last sampling period in which a kernel ran, 0 to 1, or null (with MIG)",
            "memory_used": "bytes of GPU memory in use",
            "memory_total": "bytes of GPU memory",
            "processes": "an object: process id to bytes of GPU memory; empty if the driver does not report it",
        },
        {
            "index": "NVML's index of the GPU",
            "uuid": "NVML's id of the GPU",
            "name": "the GPU's product name",
            "mig": "true if the GPU is divided by MIG",
            "driver": "the version of NVIDIA's driver, or null",
        },
    ),
    "group_announced": EventSchema(
        "A TrialGroup exists from now on.",
        {
            "group": "the group's id",
            "synchronous": "true if the trials are one batch whose makespan counts, such as a grid or a rung",
            "algorithm": "the algorithm that made the group, in words",
        },
        {"concurrency": "the largest number of the group's trials that run at once, or null"},
    ),
    "trial_added": EventSchema(
        "Tune wants this trial to run: it is new, was promoted, or returns from a pause.",
        {
            "trial": TRIAL,
            "group": "its group's id",
            "kind": '"plain", "checkpointing" or "elastic"',
            "iterations": "iterations left in its budget, or null if unknown",
        },
        {
            "share": "the width that the script asked for: a part of one device, or a number of devices",
            "name": "the trial's name, as Tune shows it",
        },
    ),
    "kind_found": EventSchema(
        "The trial turned out to be of this kind while it ran.",
        {"trial": TRIAL, "kind": '"plain", "checkpointing" or "elastic"'},
    ),
    "trial_started": EventSchema(
        "From now on the trial holds exactly these devices.",
        {
            "trial": TRIAL,
            "devices": _DEVICES,
            "share": "its part of each device: 1, or 1/p when packed with p trials",
            "resumed": "true if it continues from a commit or checkpoint",
        },
        {"reason": _REASON, **_WHY},
    ),
    "trial_result": EventSchema(
        "The trial has done one iteration, or several one after the other at one width, since its last `trial_result`.",
        {
            "trial": TRIAL,
            "iteration": "the iteration's number, as the trial counts; of several that of the last",
            "seconds": "duration of the iteration, s; of several their mean",
            "width": "the width, in devices, at which the iteration really ran",
            "metric": "the value of Tune's metric, or null; of several that of the last",
        },
        {
            "iterations": "number of iterations; 1 if absent",
            "began": "with several: when the first of them began, in unix seconds",
            "memory": "with lanes: measured need, [persistent, ephemeral], as parts of a device's memory",
        },
    ),
    "trial_silent": EventSchema(
        "The trial has not reported for much longer than its earlier iterations took. It keeps its devices.",
        {
            "trial": TRIAL,
            "seconds": "time since the iteration was requested, s",
            "usual": "its longest iteration so far, s, or null before the job's first result",
        },
    ),
    "resize_started": EventSchema(
        "The trial was told to change its workers. It holds `devices_from` until `resized`.",
        {
            "trial": TRIAL,
            "devices_from": _DEVICES,
            "devices_to": _DEVICES,
            "reason": _REASON,
        },
        _WHY,
    ),
    "resized": EventSchema(
        "The resize is done. From now on the trial holds exactly these devices.",
        {"trial": TRIAL, "devices": _DEVICES, "seconds": "how long the trial paused for the resize, s"},
        {
            "share": "its part of each device; if absent: as before if the devices did not change, else 1",
            "reason": "why, in words, where no `resize_started` has said it: the trial lost workers",
            "why": 'the reason\'s name, "worker_lost", where there is a `reason`',
        },
    ),
    "resize_failed": EventSchema(
        "The resize failed. The trial continues on these devices.",
        {"trial": TRIAL, "devices": _DEVICES, "reason": _REASON},
    ),
    "workers_differed": EventSchema(
        "At the boundary after an iteration, something that must be equal differed between the trial's workers. They"
        " have taken over the leader's state.",
        {"trial": TRIAL, "reason": "what differed, in words"},
    ),
    "growth_checked": EventSchema(
        "Before the trial grew, a new worker has computed up to eight steps of its loop whole and divided among two"
        " workers.",
        {
            "trial": TRIAL,
            "verdict": '"same", "differs" (the trial does not grow) or "unknown" (it could not be compared)',
            "reason": 'why, in words; empty with "same"',
        },
    ),
    "growth_ended": EventSchema(
        "The trial's loop cannot have several workers: from now on the trial has one.",
        {"trial": TRIAL, "reason": _REASON},
    ),
    "suspend_asked": EventSchema(
        "The trial is to leave its devices at its next commit or checkpoint, and to start again. It keeps its devices"
        " until then.",
        {"trial": TRIAL, "reason": _REASON},
        _WHY,
    ),
    "trial_suspended": EventSchema(
        "The trial left its devices at a commit. It will be started again.",
        {"trial": TRIAL},
        {"reason": _REASON},
    ),
    "trial_ended": EventSchema(
        "Tune paused or ended the trial, and its devices are free. A paused trial returns with `trial_added`, or is"
        " stopped, or failed, with another `trial_ended`.",
        {"trial": TRIAL, "ending": '"paused", "stopped" or "failed"'},
        {"reason": _REASON},
    ),
    "worker_started": EventSchema(
        "A worker process is ready.",
        {
            "worker": "the worker's id",
            "device": "device number",
            "pid": "its process id",
            "seconds": "time from the request for the process until it was ready, s",
        },
        {
            "forked": "true if the process was forked from its node's server, false if it is a plain new one",
            "spare": "true if it was started before a trial needed it",
            "mps": "with lanes on GPUs: true if the worker is a client of MPS, false if processes take time slices",
        },
    ),
    "spare_taken": EventSchema(
        "A trial gets a worker that was started before the trial needed it.",
        {"worker": "the worker's id", "device": "device number"},
    ),
    "worker_lost": EventSchema(
        "A worker process died, but its device is still there. If the event has a `trial`, that trial holds no device"
        " until it is started again. Otherwise a trial on that device holds it until the trial's `recovered` or next"
        " `trial_started`.",
        {"worker": "the worker's id", "device": "device number", "reason": _REASON},
        {"trial": "the trial that the worker worked for"},
    ),
    "worker_replaced": EventSchema(
        "The worker serves no further trial, because of what a trial has left in its process (docs/workers.md) or"
        " because it did not clean up in time. A new process takes its place when its device is needed.",
        {"worker": "the worker's id", "device": "device number", "reason": _REASON},
    ),
    "recovered": EventSchema(
        "The trial lost a worker and continues from its last commit.",
        {
            "trial": TRIAL,
            "iteration": "the last iteration in that commit",
            "reason": "the loss, in words",
        },
    ),
    "room_lacking": EventSchema(
        "With lanes: the memory of the device has no room for the trial. The trial returns to the queue.",
        {
            "trial": TRIAL,
            "device": "device number",
            "memory": "its need, [persistent, ephemeral], as parts of a device's memory, or null if unknown",
            "reason": _REASON,
        },
    ),
    "run_ended": EventSchema(
        "The experiment is over.",
        {
            "seconds": "time since this driver's run_started, s",
            "trials": "number of trials",
            "best": 'the best trial and its value of Tune\'s metric, {"trial": id, "metric": value}, or null',
        },
    ),
    **SERVING,
}


class EventLogError(FluidTuneError):
    """An event that the schema does not allow, or a file that is not an event log."""


class NoEventLogError(EventLogError, FileNotFoundError):
    """There is no event log at the path that was given."""


def check_event(event: str, fields: Mapping[str, Any]) -> None:
    """Raise `EventLogError` unless ``event`` exists and has all required and no unknown ``fields``."""
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
    """``value`` as JSON can express it: a number that is not finite becomes None, an unknown type its str()."""
    if value is None or isinstance(value, (str, bool)):
        return value
    # Integral and Real also cover Fraction widths and numpy scalars.
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    if callable(getattr(value, "item", None)) and getattr(value, "shape", ()) == ():
        # numpy's and torch's scalars; a 0-d array has __iter__ but cannot be iterated.
        return _plain(value.item())
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    return str(value)


class EventLog:
    """Appends events to one JSON-lines file. Several threads of one process may write.

    ``path``: the file. A missing directory is made, and an existing log is continued.
    ``clock``: returns unix seconds; tests pass another clock.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.time) -> None:
        #: Where the log is.
        self.path = Path(path)
        self._clock = clock
        self._lock = threading.Lock()
        #: The last line has no end: only a part of it could be written.
        self._cut = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND and no buffer in this process: the kernel has the line when write() returns, so a driver that is
        # killed afterwards does not lose it.
        self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end_cut_line()

    def _end_cut_line(self) -> None:
        # A driver that was killed while it wrote left a line without a newline. Our first line must not continue it.
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def write(self, event: str, /, **fields: Any) -> None:
        """Append one event with the present time.

        Raises:
            EventLogError: the schema does not allow it.
            OSError: it cannot be written, as on a full disk. Later ones can be tried.
        """
        check_event(event, fields)
        plain = {name: _plain(value) for name, value in fields.items()}
        with self._lock:
            if self._fd is None:
                raise EventLogError(f"the event log {self.path} is closed; {event!r} was not written")
            # The clock is read under the lock, so that lines are in the order of their times.
            record = {"t": float(self._clock()), "event": event, **plain}
            line = json.dumps(record, allow_nan=False, separators=(", ", ": ")) + "\n"
            left = ("\n" + line if self._cut else line).encode()
            while left:  # write() may write only a part, for example on a full disk
                left = left[os.write(self._fd, left) :]
                self._cut = bool(left)

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
    """The events of one log in the order of the file.

    ``dropped``: the number of broken lines. A driver that is killed while it writes leaves one.
    """

    def __init__(self, events: Iterable[EventDict] = (), dropped: int = 0) -> None:
        super().__init__(events)
        self.dropped = dropped


def record_of(line: bytes) -> EventDict | None:
    """The event in a line of a log. None: the line is broken; an empty one: it is JSON, and no event."""
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    named = isinstance(record, dict) and isinstance(record.get("event"), str)
    return record if named and isinstance(record.get("t"), (int, float)) else {}


def read_events(path: str | os.PathLike[str]) -> Events:
    """The events of the log at ``path``; none if the file is empty.

    A line that is not a complete JSON object is dropped and counted in `Events.dropped`. A killed driver leaves such a
    line at the end of the file or, in a restored experiment, before the next ``run_started``. Events that this version
    does not know are kept, so that the log of a newer version can be read.
    Raises FileNotFoundError if there is no file, and `EventLogError` if it is not an event log.
    """
    path = Path(path)
    events: list[EventDict] = []
    dropped = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            record = record_of(line)
            # If a killed driver left this first line, it is the beginning of a line as `write` writes it.
            if record is None and (events or line.startswith(b'{"t": ') or b'{"t": '.startswith(line)):
                dropped += 1
                continue
            if not record:
                raise _not_a_log(path, number)
            events.append(record)
    return Events(events, dropped)


def _not_a_log(path: Path, number: int) -> EventLogError:
    return EventLogError(
        f'{path} is not a FluidTune event log: line {number} is not {{"t": seconds, "event": name, ...}};'
        f" give the {EVENT_LOG_NAME} in a run's directory"
    )


def load_events(events_or_path: Iterable[EventDict] | str | os.PathLike[str]) -> Events:
    """The events that are given, or those in the event log or run's directory that is given."""
    if isinstance(events_or_path, Events):
        return events_or_path
    if isinstance(events_or_path, (str, os.PathLike)):
        return read_events(find_log(events_or_path))
    return Events(events_or_path)


def find_log(run_dir_or_log: str | os.PathLike[str]) -> Path:
    """The path of the event log, given that path or its run's directory. Raises `NoEventLogError` if there is none."""
    path = Path(run_dir_or_log)
    log = path / EVENT_LOG_NAME if path.is_dir() else path
    if not log.is_file():
        raise NoEventLogError(
            f"there is no event log at {str(log)!r}; give the directory of an experiment run by FluidTune, or the"
            f" {EVENT_LOG_NAME} in it"
        )
    return log


def schema_markdown() -> str:
    """The schema as Markdown, wrapped at 100 columns; docs/events.md ends with it."""
    parts = []
    for event, schema in SCHEMA.items():
        meaning = textwrap.fill(schema.meaning, width=100)
        rows = [f"| `{name}` | {text} |" for name, text in schema.required.items()]
        rows += [f"| `{name}` (optional) | {text} |" for name, text in schema.optional.items()]
        head = [f"### {event}", "", meaning, "", "| field | what it is |", "|---|---|"]
        parts.append("\n".join(head + rows))
    return "\n\n".join(parts) + "\n"
