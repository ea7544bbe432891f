"""A log that is still written: what it has got since the last look.

A torn last line is kept until its rest comes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fluidtune.report.events import (
    EventDict,
    NoEventLogError,
    may_be_cut,
    not_a_log,
    reading,
    record_of,
    this_machine,
)

#: Seconds between two looks.
LOOK_S = 1.0


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


def driver_died(head: EventDict) -> bool:
    """Whether the process that wrote this `run_started` is gone. False: it lives, or that cannot be seen from here."""
    import psutil

    if head.get("pid") is None or head.get("machine") != this_machine():
        return False
    try:
        process = psutil.Process(head["pid"])
        # The number may be another process' by now. Both times are of a clock that is set now and then.
        return process.status() == psutil.STATUS_ZOMBIE or float(process.create_time()) > head["t"] + 60
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, OverflowError, ValueError):
        return False


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
