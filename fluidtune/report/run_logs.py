"""Which event log a user means by a path: that of one run, or that of the run below it which was written last."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from fluidtune.report.events import EVENT_LOG_NAME, NoEventLogError, reading
from fluidtune.report.terminal_text import listed


def results_directory(where: str | os.PathLike[str] | None) -> Path:
    """The directory that a user means; None: Ray's own ~/ray_results."""
    return Path.home() / "ray_results" if where is None else Path(where)


def find_log(where: str | os.PathLike[str] | None, newest: bool = False) -> Path:
    """The event log ``where``, or the one in that directory. ``newest``: else the newest of the runs directly in it.

    Raises `NoEventLogError`, which lists the runs that are near, and `EventLogError` if this user may not look.
    """
    path = results_directory(where)
    with reading(path):
        log = path / EVENT_LOG_NAME if path.is_dir() else path
        if log.is_file():
            return log
        what, near = ("event log in the directory", path) if path.is_dir() else ("directory", path.parent)
        below = _logs_below(near)
    if newest and below and near == path:
        return below[0]
    there = f"there are runs in {listed([str(log.parent) for log in below])}" if below else f"{str(near)!r} has no runs"
    raise NoEventLogError(f"there is no {what} {str(path)!r}; {there}; give the directory of a run")


def logs_in(where: Path) -> list[Path]:
    """The event log in ``where``, or all those of the directories directly in it, as `_logs_below`."""
    try:
        return [find_log(where)]
    except NoEventLogError:
        return _logs_below(where)


def _logs_below(where: Path) -> list[Path]:
    """Those of the directories directly in it, the one written last first."""
    found: list[tuple[int, Path]] = []
    for log in where.glob(f"*/{EVENT_LOG_NAME}"):
        with suppress(OSError):  # it was deleted a moment ago
            there = log.stat()
            if stat.S_ISREG(there.st_mode):  # to open a pipe would wait for a writer
                found.append((there.st_mtime_ns, log))
    return [log for _, log in sorted(found, reverse=True)]
