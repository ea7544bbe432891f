"""A log that is still written: what it has got since the last look, and whether its driver lives.

A torn last line is kept until its rest comes.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from fluidtune.driver_lock import is_held, this_machine
from fluidtune.report.events import EVENT_LOG_NAME, EventDict, NoEventLogError, events_of, reading

#: Seconds between two looks.
LOOK_S = 1.0


class LogTail:
    """The log at ``log``, while it is written: `new` returns what has come since the last call."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._file: BinaryIO | None = None
        #: Lines so far that cannot be read, as `read_events` counts them.
        self.dropped = 0

    def anew(self) -> bool:
        """Read from its first line on what is there now, if that is another file than before. Returns whether it is.

        Raises `NoEventLogError` if there has been none so far, and `EventLogError` if it may not be read.
        """
        if self.left is not None:
            return False
        borne = () if self._file is None else (FileNotFoundError,)
        with reading(self._log), suppress(*borne):
            if not stat.S_ISREG(self._log.stat().st_mode):  # to open a pipe would wait for a writer
                raise NoEventLogError(f"{self._log} is no file")
            file = self._log.open("rb")
            self.close()
            self._file, self._part, self._begun, self._lines, self.dropped = file, b"", False, 0, 0
            return True
        return False

    def new(self, most: int = -1) -> list[EventDict]:
        """The events of the lines that are complete by now. What cannot be read is left out, as by `read_events`.

        ``most``: bytes that are read; -1: all. Raises `EventLogError` if the file is not an event log.
        """
        assert self._file is not None, "`anew` was never called"
        with reading(self._log):
            *lines, self._part = (self._part + self._file.read(most)).split(b"\n")
        found = events_of(self._log, lines, self._begun, self._lines + 1)
        self._lines += len(lines)
        self._begun, self.dropped = self._begun or bool(found), self.dropped + found.dropped
        return found

    @property
    def left(self) -> int | None:
        """Bytes that were not read yet. None: the file is another one by now, or begins anew, or is not there."""
        if self._file is None:
            return None
        mine, size = os.fstat(self._file.fileno()), self._file.tell()
        try:
            there = os.stat(self._log)
        except OSError:
            return None
        same = (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
        return there.st_size - size if same and there.st_size >= size else None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def driver_state(log: Path, told: Callable[[], tuple[EventDict, bool]]) -> Literal["lives", "ended", "died", "unknown"]:
    """What became of the driver of the run with this log. "unknown": it cannot be seen from here.

    A lock that is held says that it lives, on whichever machine. One that is not held says nothing: there are drivers
    and file systems without locks. Then the log says it, and the process that wrote it. ``told``: `Fold.last_driver`.
    """
    import psutil

    if log.name == EVENT_LOG_NAME and is_held(log.parent):  # under another name it is that of a former run
        return "lives"
    head, over = told()
    if over:
        return "ended"
    if head.get("pid") is None or head.get("machine") != this_machine():
        return "unknown"
    try:
        process = psutil.Process(head["pid"])
        # The number may be another process' by now. Both times are of a clock that is set now and then.
        gone = process.status() == psutil.STATUS_ZOMBIE or float(process.create_time()) > head["t"] + 60
        return "died" if gone else "lives"
    except psutil.NoSuchProcess:
        return "died"
    except (psutil.Error, OverflowError, ValueError):
        return "unknown"


def awaited(find: Callable[[], Any], tell: Callable[[str], None], patient: bool) -> Any:
    """What ``find`` finds. Where there is no event log yet and somebody is ``patient``, it is waited for.

    ``tell`` gets one line that says so.
    """
    try:
        return find()
    except NoEventLogError as error:
        if not patient:
            raise
        tell(f"{error}; it is waited for, until Ctrl-C")
    while True:
        time.sleep(LOOK_S)
        with suppress(NoEventLogError):
            return find()


def seconds_since(now: float, at: Any) -> float:
    """Seconds from ``at`` to ``now``; 0 if the clock of the machine that wrote ``at`` is ahead."""
    return max(0.0, now - float(at))


def wall_clock(at: float) -> str:
    """The time of day, 14:05:09, where this process runs."""
    return time.strftime("%H:%M:%S", time.localtime(at))
