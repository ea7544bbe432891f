"""What benchmarks.gate, switch, pack and inference share: processes at one device, and work of a known length.

This is not a benchmark. A child is started with `spawn`, says when it is ready, and begins when all children are.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Semaphore
from typing import Any

_spawn = multiprocessing.get_context("spawn")
#: What a child says when it can begin.
READY = "ready"


@contextlib.contextmanager
def device_home() -> Iterator[Path]:
    """A directory for a device of its own."""
    directory = Path(tempfile.mkdtemp(prefix="salus-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def together(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> tuple[float, list[Any]]:
    """Run ``work(begin, *arguments)`` in a process each. ``begin()`` returns when all have called it.

    Returns the seconds from then until the last has returned, and what each returned. Raises what one raised.
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
            answer = pipe.recv()
            if answer != READY:
                raise answer if isinstance(answer, BaseException) else RuntimeError(f"ended early, with {answer!r}")
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
        pipe.send(READY)
        pipe.recv()

    try:
        pipe.send(work(begin, *arguments))
    except Exception as error:
        pipe.send(error)


def all_ready(ready: Semaphore, futures: Sequence[Future[Any]]) -> None:
    """Wait until every thread has released ``ready``. Raises what one raised before."""
    for _ in futures:
        while not ready.acquire(timeout=0.5):
            for future in futures:
                if future.done():
                    future.result()


def pin(core: int = 0) -> None:
    """Keep this process on one core, which is the device of these benchmarks."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


def spin(seconds: float) -> None:
    """Keep the core busy for ``seconds`` of CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
