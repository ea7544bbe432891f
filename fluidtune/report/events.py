"""The event log of one experiment: one JSON object per line, written by the driver and read back by the report.

Decides how a value becomes JSON, and which lines can be read. Which events there are is in schema.py. A driver that is
killed at any instant loses at most the line that it was writing. fluidtune/tune and fluidtune/serving decide when an
event is written; fold.py draws conclusions from events.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from fluidtune.report.schema import EventLogError, check_event, is_readable

logger = logging.getLogger(__name__)

#: The event log's file name in a run's directory.
EVENT_LOG_NAME = "fluid_events.jsonl"
#: A service's directory below that of its run; that of a service with a name of its own has "-NAME" after it.
SERVICE_DIRECTORY = "serving"


def service_of(directory: str) -> str | None:
    """The name of its own of the service with a directory of this name; "": it is called as its run. None: of none."""
    first, dash, name = directory.partition("-")
    return name if first == SERVICE_DIRECTORY and bool(name) is bool(dash) else None


#: One event as read back: "t" (unix seconds), "event" (its name) and the event's own fields.
EventDict = dict[str, Any]


class NoEventLogError(EventLogError, FileNotFoundError):
    """There is no event log at the path that was given."""


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

    What cannot be written is lost, and the run goes on. ``warning``: what Python's log says about the first loss, with
    a ``%s`` for the error.
    """

    def __init__(self, warning: str) -> None:
        self._warning = warning
        #: The first error.
        self.lost: Exception | None = None
        #: Where the log is, once it is there.
        self._path: Path | None = None
        self._fd: int | None = None
        self._clock: Callable[[], float] = time.time
        self._lock = threading.Lock()
        #: The last line has no end: only a part of it could be written.
        self._cut = False

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    def open(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        """Begin or continue the log in ``directory``, which is made if it is missing.

        Until then, and if that fails, `write` writes nothing.
        ``clock``: returns unix seconds; tests pass another clock.
        """
        path = directory / EVENT_LOG_NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # O_APPEND and no buffer in this process: the kernel has the line when write() returns, so a driver that is
            # killed afterwards does not lose it.
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            # A driver that was killed while it wrote left a line without a newline. Ours must not continue it.
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                os.write(fd, b"\n")
        except OSError as error:
            self.loses(error)
        else:
            self._path, self._fd, self._clock = path, fd, clock

    def write(self, event: str, /, **fields: Any) -> None:
        """Append one event with the present time. One that cannot be written, as on a full disk, is lost.

        The next event is tried again. Raises `EventLogError` if the schema does not allow the event.
        """
        if self._path is None:
            return
        check_event(event, fields)
        plain = {name: _plain(value) for name, value in fields.items()}
        with self._lock:
            if self._fd is None:
                raise EventLogError(f"the event log {self._path} is closed; {event!r} was not written")
            # The clock is read under the lock, so that lines are in the order of their times.
            record = {"t": float(self._clock()), "event": event, **plain}
            line = json.dumps(record, allow_nan=False, separators=(", ", ": ")) + "\n"
            left = ("\n" + line if self._cut else line).encode()
            try:
                while left:  # write() may write only a part, for example on a full disk
                    left = left[os.write(self._fd, left) :]
                    self._cut = bool(left)
            except OSError as error:
                self.loses(error)

    def loses(self, error: Exception) -> None:
        """Something could not be written."""
        if self.lost is None:
            self.lost = error
            logger.warning(self._warning, error)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


class Events(list[EventDict]):
    """The events of one log in the order of the file."""

    #: The number of lines that cannot be read. A driver that is killed while it writes leaves one.
    dropped = 0


def record_of(line: bytes) -> EventDict | None:
    """The event in a line of a log. None: it cannot be read; an empty one: it is JSON, and no event.

    All readers of a log have its events from here, so what they rely on is there (schema.py).
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        return None
    named = isinstance(record, dict) and isinstance(record.get("event"), str)
    if not named or not isinstance(record.get("t"), (int, float)):
        return {}
    return record if is_readable(record) else None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What keeps this user from ``path`` is an `EventLogError`; if nothing is there, a `NoEventLogError`."""
    try:
        yield
    except EventLogError:
        raise
    except FileNotFoundError as error:
        raise NoEventLogError(f"{path} cannot be read: {error.strerror}") from None
    except OSError as error:
        raise EventLogError(f"{path} cannot be read: {error.strerror}") from None


def read_events(path: str | os.PathLike[str]) -> Events:
    """The events of the log at ``path``, see `events_of`; none if the file is empty.

    Raises `NoEventLogError` if there is no file, and `EventLogError` if it is not an event log or may not be read.
    """
    path = Path(path)
    with reading(path), path.open("rb") as file:
        return events_of(path, file)


def events_of(log: Path, lines: Iterable[bytes], begun: bool = False, first: int = 1) -> Events:
    """The events of these lines of the log, from its ``first`` on. ``begun``: whether it had events before them.

    A line that cannot be read (see `record_of`) is dropped and counted in `Events.dropped`. A killed driver leaves a
    part of one at the end of the file or, in a restored experiment, before the next ``run_started``. Events that this
    version does not know are kept, so that the log of a newer version can be read.
    Raises `EventLogError` if a line before the first event shows that the file is no event log.
    """
    found = Events()
    for number, line in enumerate(lines, first):
        if not line.strip():
            continue
        event = record_of(line)
        if event:
            found.append(event)
        elif begun or found or (event is None and _may_be_cut(line)):
            found.dropped += 1
        else:
            raise EventLogError(
                f'{log} is not a FluidTune event log: line {number} is not {{"t": seconds, "event": name, ...}};'
                f" give the {EVENT_LOG_NAME} in a run's directory"
            )
    return found


def _may_be_cut(line: bytes) -> bool:
    """Whether a killed driver may have left this line: it is the beginning of one as `EventLog.write` writes it."""
    return line.startswith(b'{"t": ') or b'{"t": '.startswith(line.rstrip(b"\n"))
