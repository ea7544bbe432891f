"""What a forked process makes of itself, so that it is what a new process would be."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from fluidtune.cluster.forks.fork_launcher import OOM_SCORE
from fluidtune.cluster.forks.launched import Launched
from fluidtune.cluster.forks.preload import not_on
from fluidtune.cluster.forks.shelf import Shelf
from fluidtune.ray_compat import worker_program

#: Where installed packages are, in a path: CPython's and Debian's names.
_SITES = re.compile(r"/(?:site|dist)-packages/(?!ray/)")


def environment_at_start() -> dict[str, str]:
    """The variables that this process was started with. Ray's worker sets others before the code of an actor runs."""
    if isinstance(os.environ, _Environ):
        return dict(os.environ.at_start)
    with open("/proc/self/environ") as file:
        return dict(each.split("=", 1) for each in file.read().split("\0") if "=" in each)


def learned_in(path: str) -> str:
    """Where children write down what they have imported that was not on the shelf. ``path``: the server's socket."""
    return f"{path}.learned"


def _teach(path: str, shelf: Shelf, known: set[str]) -> None:
    new = [name for name in not_on(shelf) if name not in known]
    if new:
        with suppress(OSError), open(path, "a") as file:
            file.write("".join(f"{name}\n" for name in new))


def become(request: Launched, shelf: Shelf, path: str) -> None:
    """Be ``PYTHON PROGRAM ARGUMENTS`` in the launcher's environment, folder and files, from the program's first line.

    What it imports that is not on the shelf, it tells the server at its end. ``path``: the server's socket.

    Ray ends whole process groups and what a dead worker has started, so the process begins a new session.
    """
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    environment = request.environment
    search_before = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    tempfile.tempdir = None  # a package may have had it looked up, in the server's environment
    with suppress(OSError):
        os.chdir(request.folder)
    os.umask(request.umask)
    for which, limits in request.limits:
        with suppress(ValueError, OSError):
            resource.setrlimit(which, limits)
    with suppress(OSError), open(OOM_SCORE, "w") as score:
        score.write(request.oom_score)
    with suppress(OSError):
        os.sched_setaffinity(0, request.cores)
        os.setpriority(os.PRIO_PROCESS, 0, request.nice)
    given = request.program
    program = list(given)
    while program and program[0].startswith("-"):
        program.pop(0)  # options of Python's, such as -u
    sys.argv[:] = program
    sys.orig_argv[:] = [sys.executable, *program]
    sys.path[:] = _search(program[0], search_before, environment.get("PYTHONPATH", ""))
    _begin_random_streams(shelf)
    shelf.in_server = False
    _Environ.shelf, _Environ.at_start = shelf, environment
    os.environ.__class__ = _Environ
    why = shelf.why_not(worker_program.MODULE) if program[0].endswith("default_worker.py") else None
    if why is not None:
        print(f"fluidtune: a plain new process: {why}", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *given])
    atexit.register(_teach, learned_in(path), shelf, set(sys.modules))
    main = sys.modules["__main__"].__dict__
    with open(program[0], "rb") as source:
        code = compile(source.read(), program[0], "exec")
    main.clear()
    main.update(__name__="__main__", __file__=program[0], __builtins__=__builtins__, __spec__=None, __doc__=None)
    main.update(__package__=None, __loader__=None, __cached__=None)
    exec(code, main)


def _search(program: str, before: str, now: str) -> list[str]:
    """`sys.path` of a new process: the program's folder, PYTHONPATH, and what the server has by itself."""
    old = {os.path.abspath(each) for each in before.split(os.pathsep) if each}
    new = [os.path.abspath(each) for each in now.split(os.pathsep) if each]
    return [os.path.dirname(os.path.abspath(program)), *new, *(each for each in sys.path if each not in old)]


class _Environ(os._Environ):  # type: ignore[type-arg]
    """`os.environ` in a forked process: it tells what the code of installed packages sets from what the user's sets."""

    shelf: Shelf
    at_start: Mapping[str, str]

    def __setitem__(self, name, value):  # type: ignore[no-untyped-def]
        super().__setitem__(name, value)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc")):
            frame = frame.f_back
        if frame is not None and _SITES.search(frame.f_code.co_filename):
            self.shelf.set_by_package(name)


def _begin_random_streams(shelf: Shelf) -> None:
    """Have what draws at random begin from entropy, as in a new process. (Python's `uuid` and `tempfile` do so.)"""
    random.seed()
    multiprocessing.process.current_process().authkey = os.urandom(32)
    numpy: Any = shelf.module("numpy.random.mtrand")
    torch: Any = shelf.module("torch")
    if numpy is not None:
        numpy.seed()
    if torch is not None:
        torch.default_generator.seed()
