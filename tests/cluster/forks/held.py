"""What a process has that forks of it would share or lack: the tests of listed packages look at it.

Forks share what the kernel keeps for the process: open files, connections, memory that is mapped as shared (such as the
locks of `multiprocessing`). They lack its threads and child processes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

#: Seconds that a fork, and what packages have registered for it, may take.
PATIENCE_S = 10
#: Devices without a state that forks could share.
_DEVICES = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}
#: Native threads that stop before a fork and are begun again where they are missed: jemalloc's, by its source
#: (src/background_thread.c, ``background_thread_prefork0``).
_STOP_FOR_FORKS = {"jemalloc_bg_thd"}


def held() -> set[str]:
    """What this process has now, each in words. What stops for a fork, as OpenBLAS' threads do, is not among it."""
    found = {f"fails in a fork: {each}" for each in _fork()}
    found |= {f"a thread {each.name}" for each in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            found |= set() if name in _STOP_FOR_FORKS else {f"a thread of compiled code {task} {name}"}
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder itself is closed by now
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            found |= set() if target in _DEVICES else {f"the open file {descriptor} {target}"}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "w" in (modes := line.split(maxsplit=2)[1]) and modes.endswith("s"):
            found.add(f"the shared memory {line}")
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        found.add("a child process")
    return found


def _fork() -> list[str]:
    """Fork once. Returns what goes wrong in the handlers for forks. A handler that waits ends this process."""
    troubles: list[str] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda error: troubles.append(str(error.exc_value))
    signal.alarm(PATIENCE_S)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(PATIENCE_S)
        os.write(write, "".join(troubles).encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        troubles += [each for each in [file.read()] if each]
    assert os.waitpid(pid, 0)[1] == 0, "a fork has not begun"
    signal.alarm(0)
    sys.unraisablehook = hook
    return troubles
