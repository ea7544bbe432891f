"""What a forked process makes of itself, so that it is what a new process would be."""

from __future__ import annotations

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

from fluidtune.cluster.forks.fork_launcher import OOM_SCORE, THREADS, THREADS_UNLESS_SET
from fluidtune.cluster.forks.launched import Launched
from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.cluster.forks.preload import MAY_DIFFER

#: The code of installed packages, and FluidTune's own, in a path: CPython's and Debian's names.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/fluidtune/(?:cluster|ray_compat|tune)/")


#: The environment that this process was forked for; None: it is no fork.
_at_start: dict[str, str] | None = None


def is_forked() -> bool:
    """Whether this process was forked from a server."""
    return _at_start is not None


def environment_at_start() -> dict[str, str]:
    """The variables that this process was started with. Ray's worker sets others before the code of an actor runs."""
    if _at_start is not None:
        return dict(_at_start)
    with open("/proc/self/environ") as file:
        return dict(each.split("=", 1) for each in file.read().split("\0") if "=" in each)


def become(request: Launched, imported_with: Mapping[str, str], reads: tuple[str, ...]) -> None:
    """Be ``PYTHON PROGRAM ARGUMENTS`` in the launcher's environment and folder, from the program's first line.

    ``imported_with``: the environment in which the server has imported. ``reads``: how the names of variables begin
    that were read then.

    Ray ends whole process groups and what a dead worker has started, so the process begins a new session.
    """
    global _at_start
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    environment, threads = request.environment, request.environment.pop(THREADS_UNLESS_SET, None)
    by_imports = {name: value for name, value in os.environ.items() if name not in imported_with}
    os.environ.clear()
    os.environ.update({**by_imports, **({THREADS: threads} if threads else {}), **environment})
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
    program = list(request.program)
    while program and program[0].startswith("-"):
        program.pop(0)  # options of Python's, such as -u
    sys.argv[:] = program
    sys.orig_argv[:] = [sys.executable, *program]
    sys.path[:] = _search(program[0], imported_with.get("PYTHONPATH", ""), environment.get("PYTHONPATH", ""))
    _begin_random_streams()
    _at_start = environment
    _Environ.imported_with, _Environ.reads = imported_with, reads
    os.environ.__class__ = _Environ
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
    """`os.environ` in a forked process: what the user's own code sets must be what its packages have read."""

    imported_with: Mapping[str, str]
    reads: tuple[str, ...]

    def __setitem__(self, name, value):  # type: ignore[no-untyped-def]
        super().__setitem__(name, value)
        if name in MAY_DIFFER or not name.startswith(self.reads) or value == self.imported_with.get(name):
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc")):
            frame = frame.f_back
        if frame is not None and not _INSTALLED.search(frame.f_code.co_filename):
            raise NeedsPlainProcess(f"{name} was {self.imported_with.get(name)!r} when packages were imported")
        torch: Any = sys.modules.get("torch")
        if name == THREADS and torch is not None:  # Ray sets it to the process' cores
            torch.set_num_threads(int(value))


def _begin_random_streams() -> None:
    """Have what draws at random begin from entropy, as in a new process. (Python's `uuid` and `tempfile` do so.)"""
    multiprocessing.process.current_process().authkey = os.urandom(32)
    random.seed()
    for module in ("numpy.random", "sympy.core.random"):  # torch imports sympy
        if module in sys.modules:
            sys.modules[module].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
