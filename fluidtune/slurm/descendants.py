"""A process' descendants: all of them end with it, also those whose parents have ended (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress

import psutil

#: prctl(2), linux/prctl.h: orphans among the descendants become children of this process.
_PR_SET_CHILD_SUBREAPER = 36


def adopt(*numbers: int) -> int:
    """From now on orphans among the descendants become children.

    Returns a descriptor. A byte in it is the number of one of these signals, blocked so far or not, or of SIGCHLD.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    heard, said = os.pipe()
    os.set_blocking(said, False)
    signal.set_wakeup_fd(said, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *numbers):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    return heard


def ended() -> dict[int, int]:
    """The children that have ended since this was asked last -> exit status; less than 0: the signal that ended it."""
    found = {}
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            found[child[0]] = os.waitstatus_to_exitcode(child[1])
    return found


def end_all(patience_s: float, but: Collection[int] = ()) -> None:
    """Send the children but some SIGTERM, and after ``patience_s`` seconds SIGKILL to what is left of descendants."""
    own = psutil.Process()
    for child in (child for child in own.children() if child.pid not in but):
        child.terminate()
    deadline = time.monotonic() + patience_s
    while left := [child for child in own.children() if child.pid not in but]:
        ended()
        for child in left if time.monotonic() > deadline else ():  # whose own children become ours
            with suppress(psutil.Error):
                child.kill()
        time.sleep(0.02)
