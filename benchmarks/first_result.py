"""What a tuning job has spent until its first result: the time since its process began, and the processor's time.

Taken once, in the driver, when the first result arrives. The processes are the driver and those that descend from it,
so a cluster that the driver did not start is not counted. The look takes the driver 3 ms (15 descendants, 130 processes
on the machine, Linux).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

#: The scripts by which Ray starts a worker process. Later the process calls itself ``ray::`` and what it does.
_STARTERS = ("default_worker.py", "setup_worker.py")
#: Processes of Ray's own that call themselves so, too: ``AGENT_PROCESS_LIST`` in ``ray._private.ray_constants``.
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


class Process(NamedTuple):
    """A descendant of the driver: its command line as it is now, and the processor's seconds that it has used."""

    command: Sequence[str]
    seconds: float


def is_worker(command: Sequence[str]) -> bool:
    """Whether Ray started the process to run tasks or actors, as trials are. The others are Ray's own."""
    title = command[0] if command else ""
    named = title.startswith("ray::") and not title.startswith(_AGENTS)
    return named or any(part.endswith(_STARTERS) for part in command)


def by_role(driver: float, others: Iterable[Process]) -> dict[str, float]:
    """Seconds of the processor by role, and the number of worker processes. ``driver``: the driver's own seconds."""
    others = list(others)
    workers = [each.seconds for each in others if is_worker(each.command)]
    whole = sum(each.seconds for each in others)
    return {
        "driver_cpu_seconds": driver,
        "workers_cpu_seconds": sum(workers),
        "ray_cpu_seconds": whole - sum(workers),
        "workers": len(workers),
    }


def age() -> float:
    """Seconds since this process began."""
    return time.time() - psutil.Process().create_time()


def spent() -> dict[str, float]:
    """What this process and its descendants have spent so far: `by_role`."""
    return by_role(time.process_time(), descendants())


def descendants() -> Iterator[Process]:
    """The processes that descend from this one and live."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            used = process.cpu_times()
            yield Process(process.cmdline(), used.user + used.system)
