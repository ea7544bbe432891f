"""When the report of a job is drawn and said in a line: beside the end of the job, never after ``fit`` has returned.

Drawing takes half a second, most of it to import matplotlib (`python -X importtime -c "import matplotlib.figure"`). So
matplotlib is imported while the trials train, and the pictures are drawn while workers and devices are given back.

The job waits for the drawing. A thread that goes on after ``fit`` would write into a folder that the script may have
moved or removed. Python may also collect garbage in that thread while the script calls ``ray.shutdown()``: if a Ray
object is among the garbage, Ray ends the whole process ("The core worker has already been shutdown").
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from fluidtune.report import summarise, write_report
from fluidtune.report.drawing import new_figure
from fluidtune.report.fold import fold_of
from fluidtune.report.summary import duration

logger = logging.getLogger(__name__)


class FinalReport:
    """The report of the job with this event log."""

    def __init__(self, log: Path):
        self._log = log
        #: The threads that were started here.
        self._threads: list[threading.Thread] = []

    def prepare(self) -> None:
        """Import matplotlib in a thread, unless that was asked for before."""
        if not self._threads:
            self._start("fluid-matplotlib", _import_matplotlib)

    def begin(self) -> None:
        """Draw in a thread. The event log must be complete."""
        self._start("fluid-report", lambda: _draw(self._log))

    def wait(self) -> None:
        """Return when the report is drawn and no thread of this object lives. The report may not have been begun."""
        for thread in self._threads:
            thread.join()

    def _start(self, name: str, target: Callable[[], None]) -> None:
        # A daemon: if the job is cut off before its end, Python does not wait for the thread.
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()


def _import_matplotlib() -> None:
    try:
        new_figure(1.0, 1.0)
    except Exception:
        logger.debug("FluidTune: matplotlib is not usable", exc_info=True)  # `_draw` says so at the end


def _draw(log: Path) -> None:
    try:
        fold = fold_of(log)
        found = summarise(fold)
        write_report(fold, found, log.parent)
        all_s = found.available_device_seconds or 1.0
        logger.warning(
            "FluidTune: %s; %.0f %% of the devices' time in iterations, %.0f %% in starts of trials. More: "
            "fluidtune report %s; of one trial: fluidtune why %s TRIAL",
            duration(found.wall_seconds),
            100 * found.time_use.iterating / all_s,
            100 * found.time_use.starting / all_s,
            *[log.parent] * 2,
        )
    except OSError as error:
        logger.warning("FluidTune: the report of this run could not be written: %s", error)
    except Exception:
        # The run's results are safe; a picture that cannot be drawn must not take them down.
        logger.exception("FluidTune: the report of this run could not be written")
