"""One run's event log, followed by the page: read in pieces, begun anew when it is replaced, kept when it is deleted.

Several views share one `FollowedRun`. Each has a cursor, which says what it has seen; so one that has slept gets what
it missed, and one that has seen another file gets everything.
"""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import Any

from fluidtune.report.events import EventLogError
from fluidtune.report.fold import Fold
from fluidtune.report.log_tail import LogTail, driver_state
from fluidtune.report.story import story_of
from fluidtune.view.run_model import ROW, changes, curve, glance
from fluidtune.view.service_figures import ServicesFigures

#: Bytes that are read at once: a thousand lines, which take some 10 ms.
PIECE = 1 << 18
#: Seconds for which a run goes on though nothing is written: its iterations may be long, or its driver has died.
QUIET_S = 3600.0


class FollowedRun:
    """The run whose log is ``log``, as far as it was read. Threads may call any method at any time."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.fold = Fold()
        self._lock = threading.Lock()
        self._tail = LogTail(log)
        self._services = ServicesFigures(log.parent)
        #: Which file, and which reading of it: the first part of a cursor.
        self._epoch = ""
        #: Bytes that are not read yet.
        self._left = 0
        #: Why nothing more is read, in words; "" if there is no reason.
        self._trouble = ""

    def look(self, cursor: str = "", seconds: float = float("inf")) -> dict[str, Any]:
        """Read on for about ``seconds``, and say what has changed since ``cursor`` ("": all there is).

        Beside what `run_model.changes` says: "cursor", for the next call; "left", bytes of the log that are not read
        yet; "trouble", why nothing more will come, in words; "died", whether the driver is gone; "services", the
        figures of those of the run.
        """
        with self._lock:
            self._read(seconds)
            epoch, _, heard = cursor.partition(".")
            known = epoch == self._epoch and heard.isdigit() and int(heard) <= self.fold.heard
            found = changes(self.fold, int(heard) if known else 0)
            found["unreadable"] = self._tail.dropped
            found |= {"cursor": f"{self._epoch}.{self.fold.heard}", "left": self._left, "trouble": self._trouble}
            return {**found, "died": self._died(), "services": self._services.figures()}

    def _died(self) -> bool:
        return driver_state(self.log, self.fold.last_driver) == "died"

    def as_dict(self) -> dict[str, Any]:
        """The run at this moment for a program. Times are seconds since its first event. Raises for a service's log."""
        glance, shown = self.glance(), self.look()
        if self.fold.counts["serving_started"]:
            raise EventLogError(f"{self.log.parent} is the log of a service; type: fluidtune serve status --json")
        held = {number: devices for number, devices, *_ in shown.get("held", [])}
        best = dict(zip(("trial", "metric"), glance["best"] or (), strict=False))
        return {
            **{name: glance[name] for name in ("run", "algorithm", "kind", "metric", "mode", "seconds", "devices")},
            "state": "ended" if glance["over"] else "died" if shown["died"] else "running",
            "silence": time.time() - glance["origin"] - glance["seconds"],
            **{"best": best or None, "states": glance["states"], "iterations": glance["iterations"]},
            "trials": [
                {**dict(zip(ROW[1:-1], row[1:-1], strict=True)), "devices": held.get(row[0], [])}
                for row in shown["trials"]
            ],
            "news": [{"at": at, "text": text} for at, text in shown.get("news", [])],
            **{"trouble": glance["trouble"], "dropped_lines": shown["unreadable"]},
        }

    def _read(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        try:
            if self._tail.anew():
                self._epoch, self.fold, self._trouble = secrets.token_hex(4), Fold(), ""
                self._services = ServicesFigures(self.log.parent)
            while (left := self._tail.left) is not None:
                self._left = left
                if left == 0 or self._trouble or time.monotonic() >= until:
                    return
                for event in self._tail.new(PIECE):
                    self.fold.step(event)
            self._left, self._trouble = 0, f"{self.log} was deleted: this is what it had"
        except EventLogError as error:
            self._trouble = str(error)
        except OSError as error:
            self._trouble = f"{self.log} cannot be read: {error.strerror}"

    def curve(self, trial: str) -> dict[str, Any]:
        """The trial's curves, see `run_model.curve`. Raises KeyError if the run has no such trial."""
        with self._lock:
            self._read(float("inf"))
            return curve(self.fold, trial)

    def story(self, trial: str) -> dict[str, Any]:
        """The trial's story as `fluidtune why` tells it. "told" has seconds, iteration and words of each sentence.

        Raises KeyError if the run has no such trial.
        """
        with self._lock:
            self._read(float("inf"))
            if trial not in self.fold.trials:
                raise KeyError(trial)
            story = story_of(self.fold, trial, self._died())
        told = [[round(at - story.began, 3), iteration, text] for at, iteration, text in story.told()]
        return {"head": story.head, "told": told, "end": list(story.end)}

    def glance(self) -> dict[str, Any]:
        """The run in a few figures, after its log was read; "trouble" as `look` says it."""
        with self._lock:
            self._read(float("inf"))
            return {**glance(self.fold), "trouble": self._trouble}

    def goes_on(self) -> bool:
        """Whether more is to come: the run has not ended as far as it was read, and something was written lately."""
        try:
            return not self.fold.over and time.time() - self.log.stat().st_mtime < QUIET_S
        except OSError:
            return False
