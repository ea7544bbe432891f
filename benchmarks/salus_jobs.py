"""What benchmarks.gate, switch, pack and inference share: processes at one device, and work of a known length.

Not a benchmark. A child is started with `spawn`, says when it is ready and begins when all are.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from salus_share import service

_spawn = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def device_home() -> Iterator[Path]:
    """A directory for a device of its own; the lane service that was started there is ended."""
    directory = Path(tempfile.mkdtemp(prefix="salus-"))
    try:
        yield directory
    finally:
        with contextlib.suppress(OSError):
            os.kill(service.status(directory)["pid"], signal.SIGTERM)
        shutil.rmtree(directory, ignore_errors=True)


def together(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> tuple[float, list[Any]]:
    """Run ``work(begin, *arguments)`` in a process each. ``begin()`` returns when all have called it.

    Returns the seconds from then until the last has returned, and what each returned.
    """
    pipes, processes = [], []
    try:
        for each in arguments:
            ours, theirs = _spawn.Pipe()
            process = _spawn.Process(target=_child, args=(theirs, work, each), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        started = time.perf_counter()
        for pipe in pipes:
            pipe.send("begin")
        found = [pipe.recv() for pipe in pipes]
        seconds = time.perf_counter() - started
    finally:
        for process in processes:
            process.kill()
            process.join()
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
    return seconds, found


def _child(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    def begin() -> None:
        pipe.send("ready")
        pipe.recv()

    try:
        pipe.send(work(begin, *arguments))
    except Exception as error:
        pipe.send(error)


def pin(core: int = 0) -> None:
    """This process on one core: the device of these benchmarks."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


def spin(seconds: float) -> None:
    """Keep the core busy for so much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
