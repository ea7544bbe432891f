"""What benchmarks.gate, switch, pack and inference share: processes at one device, and work of a known length.

This is not a benchmark. A child is started with `spawn`, says when it is ready, and begins when all children are.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Semaphore
from typing import Any

from salus_share import service
from salus_share.gate import Gate
from salus_share.policies import Pack
from salus_share.seat_table import SeatTable
from salus_share.turns import IDLE

_spawn = multiprocessing.get_context("spawn")
#: What a child says when it can begin.
READY = "ready"
#: Seconds within which a lane service answers.
STATUS_S = 5.0


@contextlib.contextmanager
def device_home() -> Iterator[Path]:
    """A directory for a device of its own. At the end, the lane service that was started there is ended."""
    directory = Path(tempfile.mkdtemp(prefix="salus-"))
    try:
        yield directory
    finally:
        end_service(directory)
        shutil.rmtree(directory, ignore_errors=True)


def service_status(directory: Path) -> dict[str, Any]:
    """The state of the device's service: pid, policy, capacity and reserved (bytes), lanes, waiting.

    Raises OSError if there is no service.
    """
    with service.connect(directory) as link:
        link.settimeout(STATUS_S)
        link.send(b'{"do": "status"}')
        told: dict[str, Any] = json.loads(link.recv(service.PACKET))
        return told


def end_service(directory: Path) -> None:
    """End the lane service of a device, if there is one."""
    with contextlib.suppress(OSError):
        os.kill(service_status(directory)["pid"], signal.SIGTERM)


class Turns(Pack):
    """PACK for a device that computes one thing at a time, as a core does: one lane, in which trials take turns.

    Lanes of their own would be time slices there: copies stay in step, so that all wait and then all compute.
    """

    name = "benchmarks.salus_jobs:Turns"
    max_lanes = 1


def seat(directory: Path, name: str, token: int) -> Gate:
    """A gate of an admitted trial of this process, in lane 0."""
    table = SeatTable(directory)
    with table.lock():
        made = table.take_seat(name, os.getpid())
        made.lane, made.token, made.arrival, made.state = 0, token, token, IDLE
        table.write(made)
    return Gate(table, made.index, token)


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
