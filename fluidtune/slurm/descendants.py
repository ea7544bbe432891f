"""A process' descendants: all of them end with it, also those whose parents have ended (Linux).

The kernel hands an orphan to the next ancestor that has asked for it: PR_SET_CHILD_SUBREAPER in prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

#: linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """From now on orphans among this process' descendants become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def heed(*numbers: int) -> int:
    """A descriptor from which the number of each of these signals, and of SIGCHLD, can be read as a byte."""
    heard, said = os.pipe()
    os.set_blocking(heard, False)
    os.set_blocking(said, False)
    signal.set_wakeup_fd(said, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *numbers):
        signal.signal(number, lambda *_: None)
    return heard


def ended() -> dict[int, int]:
    """The children that have ended since this was asked last -> exit status; less than 0: the signal that ended it."""
    found = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            found[pid] = os.waitstatus_to_exitcode(status)
    return found


def end_all(patience_s: float) -> None:
    """Ask the children to end by SIGTERM, and kill what is left of all descendants after ``patience_s`` seconds."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            child.terminate()
    await_end(lambda: not psutil.Process().children(), patience_s)
    while left := psutil.Process().children():
        for child in left:  # whose own children become ours
            with suppress(psutil.Error):
                child.kill()
        time.sleep(0.01)
        ended()


def await_end(over: Callable[[], bool], patience_s: float) -> bool:
    """Whether ``over`` has become true within so many seconds. Children that end meanwhile are waited for."""
    deadline = time.monotonic() + patience_s
    while True:
        ended()
        if over():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
