"""The notice that a driver is to end soon: SIGTERM, as Kubernetes, Slurm and ``kill`` send it, while a run goes on.

    none --SIGTERM--> leaving --no trial can be saved any more, or COMMITS_PART of notice_s is over--> over

- *none*: the run goes on.
- *leaving*: every device leaves. A trial that can be saved is, at its next boundary, and waits then. Others train on.
- *over*: Tune's loop ends. Tune saves its state, processes end, devices and leases are given back. Then the driver ends
  with status `AGAIN`.

A second SIGTERM, later than `SAME_S`, and the end of ``notice_s`` end the driver at once, whatever it waits for. The
status is the same. No exit handler runs then, and the run can be restored, as after a SIGKILL.

The boundary: from a run's first trial to its end, in a driver whose run is in the main thread. A script that handles or
ignores SIGTERM itself keeps its own way. SIGINT and SIGUSR1 are Tune's: the run ends in order, and ``fit`` returns.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from fluidtune.slurm.submission import DRIVER_S

logger = logging.getLogger(__name__)

#: The driver's exit status: "try again later", in BSD's sysexits.h. No shell, and not Python, ends with it by itself.
AGAIN = os.EX_TEMPFAIL
#: Seconds in which a second SIGTERM is the first one, by another way: Slurm may tell a job's processes, and so does the
#: program that started this one. Judgement: both come at once.
SAME_S = 1.0
#: The part of ``notice_s`` in which trials are saved. Judgement: the last snapshot and the end of processes take less.
COMMITS_PART = 2 / 3


def seconds_for(notice_s: float) -> float:
    """``notice_s``, or what this process' Slurm job leaves of it, with a line that says so."""
    left = float(os.environ.get(DRIVER_S) or notice_s)
    if left < notice_s:
        said = "FluidTune: notice_s=%g: this Slurm job leaves its driver %g s; give a longer fluidtune slurm --notice"
        logger.warning(said, notice_s, left)
    return min(left, notice_s)


def why_not_again(restored: bool, reported: bool) -> str:
    """Why a job that Slurm has begun again would get nowhere if it was begun once more; "": it goes on.

    ``restored``: its run was. ``reported``: a trial has reported since.
    """
    if not int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        return ""
    if not restored:
        return "its script began a new run in place of restoring the one before (docs/how-to/restore.md)"
    return "" if reported else "no trial has reported since; it needs a longer time limit"


class Notice:
    """The notice to one run. Every state but the first begins in `advance`, and so between two steps of Tune's loop.

    ``notice_s``: seconds from the signal to the end. ``status``: the driver's exit status. ``clock``: seconds.
    """

    def __init__(
        self, notice_s: float, status: Callable[[], int] = lambda: AGAIN, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.notice_s, self._status, self._clock = notice_s, status, clock
        self.state: Literal["none", "leaving", "over"] = "none"
        #: When the signal came; None: it has not.
        self._given: float | None = None
        #: What SIGTERM did before, while we listen to it; None: we do not.
        self._before: Any = None
        self._timer: threading.Timer | None = None

    @property
    def seconds(self) -> float:
        """How long ago the signal came, in seconds; 0: it has not."""
        return 0.0 if self._given is None else self._clock() - self._given

    def advance(self, unsaved: Callable[[], bool]) -> bool:
        """Go on to the next state, if it is time. Returns whether it did.

        ``unsaved``: whether there are trials that can be saved and are not.
        """
        if self.state == "none" and self._given is not None:
            self.state = "leaving"
        elif self.state == "leaving" and (self.seconds >= COMMITS_PART * self.notice_s or not unsaved()):
            self.state = "over"
        else:
            return False
        return True

    # --- the signal

    def listen(self) -> None:
        """Have SIGTERM give notice from now on, unless the script handles it, or this is not the main thread."""
        found = signal.getsignal(signal.SIGTERM)
        ours = found == signal.SIG_DFL or getattr(found, "__module__", "").partition(".")[0] == "ray"
        if ours and threading.current_thread() is threading.main_thread():
            self._before = found
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._given is not None:
            if self.seconds >= min(SAME_S, self.notice_s / 2):
                self._end()
            return
        self._given = self._clock()
        self._timer = threading.Timer(self.notice_s, self._end)
        self._timer.daemon = True
        self._timer.start()
        logger.warning(
            "FluidTune: SIGTERM: trials are saved, and the driver ends within %g s, with status %d. The run can be "
            "restored. A second SIGTERM ends it at once",
            self.notice_s,
            AGAIN,
        )

    def _end(self) -> None:
        """End the process. `sys.exit` would not: the main thread may be in code of Ray's, or wait for a storage."""
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(self._status())

    def close(self) -> None:
        """The run has ended: SIGTERM does what it did before."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
        if self._timer is not None:
            self._timer.cancel()
