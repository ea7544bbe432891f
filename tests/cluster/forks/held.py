"""What a process has that forks of it would share or lack: the tests of listed packages look at it.

Forks share what the kernel keeps for the process: open files, connections, memory that is mapped as shared (such as the
locks of `multiprocessing`). They lack its threads and child processes.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

#: Seconds within which a fork must have begun.
PATIENCE_S = 10.0
#: Devices without a state that forks could share.
_DEVICES = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}
#: Native threads that stop before a fork and are begun again where they are missed: jemalloc's, by its source
#: (src/background_thread.c, ``background_thread_prefork0``).
_STOP_FOR_FORKS = {"jemalloc_bg_thd"}


@dataclass(frozen=True)
class Held:
    """What this process has. Each as /proc names it; ``native``: threads that outlive a fork, and are not in it."""

    threads: set[threading.Thread] = field(default_factory=set)
    native: set[str] = field(default_factory=set)
    files: set[tuple[str, str]] = field(default_factory=set)
    mappings: set[str] = field(default_factory=set)
    children: bool = False


def held() -> Held:
    """What this process has now."""
    _fork()
    return Held(set(threading.enumerate()), set(_native()), set(_files()), set(_mappings()), _has_children())


def unforkable(before: Held) -> str | None:
    """Why this process can be forked no more, in words; None: it can. ``before``: what it had when it could."""
    threads = [each.name for each in threading.enumerate() if each not in before.threads]
    if threads:
        return f"has started a thread ({', '.join(threads)})"
    if _has_children() and not before.children:
        return "has started a process"
    trouble = _fork()
    if trouble is not None:
        return f"cannot be forked: {trouble}"
    for task in _native():
        if task not in before.native:
            return f"has started a thread ({_name_of(task)})"
    for each in _files():
        if each not in before.files:
            return f"has opened {each[1]}, which all processes would share"
    for mapping in _mappings():
        if mapping not in before.mappings:
            return f"has made memory that all processes would share ({mapping.split(maxsplit=5)[-1]})"
    return None


def _native() -> Iterator[str]:
    """Numbers of the threads of this process. Those are none that a library stops before each fork, as OpenBLAS does:
    there has just been one.
    """
    for task in os.listdir("/proc/self/task"):
        if _name_of(task) not in _STOP_FOR_FORKS:
            yield task


def _name_of(task: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/self/task/{task}/comm").read_text().strip()
    return "one that has ended"


def _files() -> Iterator[tuple[str, str]]:
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder itself is closed by now
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target not in _DEVICES:
                yield descriptor, target


def _mappings() -> Iterator[str]:
    """Those that are shared and can be written to."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "w" in (modes := line.split(maxsplit=2)[1]) and modes.endswith("s"):
            yield line


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def in_fork(tell: Callable[[], bytes], forking: AbstractContextManager[Any] | None = None) -> bytes:
    """What ``tell`` returns in a fork of this process: less than a page. ``forking``: what to fork in.

    Raises:
        TimeoutError: it has not begun within `PATIENCE_S`.
    """
    read, write = os.pipe()
    with forking or nullcontext():
        pid = os.fork()
        if pid == 0:
            os.write(write, tell())
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        begun = bool(select.select([file], [], [], PATIENCE_S)[0])
        if not begun:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if not begun:
            raise TimeoutError(f"a fork has not begun after {PATIENCE_S:.0f} s")
        return file.read()


def _fork() -> str | None:
    """Fork once. Returns what goes wrong in the handlers that packages have registered for forks; None: nothing."""
    troubles: list[str] = []
    try:
        troubles.append(in_fork(lambda: "; ".join(troubles).encode()[:4000], _noting(troubles)).decode())
    except TimeoutError as error:
        troubles.append(str(error))
    return next((each for each in troubles if each), None)


@contextmanager
def _noting(found: list[str]) -> Iterator[None]:
    """Note errors that Python would only print, and waits that do not end before `PATIENCE_S` are over."""

    def note(error: Any) -> None:
        found.append(f"{type(error.exc_value).__name__}: {error.exc_value}")

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"a handler waits for more than {PATIENCE_S:.0f} s before a fork")

    hook, sys.unraisablehook = sys.unraisablehook, note
    usual = signal.signal(signal.SIGALRM, stop)
    other = signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, usual)
        signal.setitimer(signal.ITIMER_REAL, *other)
        sys.unraisablehook = hook
