"""Which runs a page can show: the one in a directory, or all those below it, and each of them at a glance."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from fluidtune.report.events import EVENT_LOG_NAME, EventDict, service_of
from fluidtune.report.log_tail import LogTail, driver_state, seconds_since
from fluidtune.report.run_logs import find_log, logs_in, results_directory
from fluidtune.view.followed_run import PIECE, FollowedRun

#: So many runs are kept as they were read, those that were asked for last, beside those that go on, which are read on
#: whenever all runs are looked at. One of 10,000 trials takes some 100 MB.
KEPT = 4


class RunList:
    """The run in ``where``, or those below it; None: those below Ray's own ~/ray_results.

    Raises `NoEventLogError` if there is none, `EventLogError` if ``where`` is a single one and no event log.
    """

    def __init__(self, where: str | os.PathLike[str] | None) -> None:
        root = results_directory(where)
        if service_of(root.name) is not None and (root.parent / EVENT_LOG_NAME).is_file():
            root = root.parent  # a service is part of its run's page
        self._root = root.absolute()
        self._lock = threading.Lock()
        self._kept: dict[str, FollowedRun] = {}
        #: Key -> the file that was read, what was said of it, and what it says of its driver (`Fold.last_driver`).
        self._glances: dict[str, tuple[tuple[int, int, int], dict[str, Any], tuple[EventDict, bool]]] = {}
        logs = list(self.logs().values())
        if not logs:
            find_log(root)  # whose error says what there is instead
        if len(logs) == 1:
            with closing(LogTail(logs[0])) as tail:
                tail.anew()
                tail.new(PIECE)

    def logs(self) -> dict[str, Path]:
        """Key -> event log, the one that was written last first. The key is the name of the run's directory."""
        return {log.parent.name: log for log in logs_in(self._root)}

    def run(self, key: str) -> FollowedRun | None:
        """The run with this key; "": the first one. None: there is none."""
        logs = self.logs()
        key = key or next(iter(logs), "")
        return self._run(key, logs.get(key))

    def _run(self, key: str, log: Path | None) -> FollowedRun | None:
        """The run with this key. ``log``: where it is now; None: it is not there, and is known only if it was kept."""
        with self._lock:
            run = self._kept.pop(key, None)
            if run is None and log is not None:
                run = FollowedRun(log)
            if run is not None:
                self._kept[key] = run
            still = [each for each, kept in self._kept.items() if not kept.goes_on()]
            for each in still[:-KEPT]:
                del self._kept[each]
            return run

    def glances(self) -> list[dict[str, Any]]:
        """Every run in a few figures, with the seconds since its last event, "silence".

        A log that has not changed is not read again.
        """
        found = []
        for key, log in self.logs().items():
            try:
                there = log.stat()
            except OSError:  # it was deleted a moment ago
                continue
            found.append(self._glance(key, log, there))
        return found

    def _glance(self, key: str, log: Path, there: os.stat_result) -> dict[str, Any]:
        stamp = (there.st_ino, there.st_size, there.st_mtime_ns)
        known = self._glances.get(key)
        if known is None or known[0] != stamp:
            run = self._run(key, log)
            assert run is not None
            known = self._glances[key] = (stamp, run.glance(), run.fold.last_driver())
        _, glance, driver = known
        silence = seconds_since(time.time(), glance["origin"] + glance["seconds"])
        return {"key": key, **glance, "silence": silence, "died": driver_state(log, lambda: driver) == "died"}
