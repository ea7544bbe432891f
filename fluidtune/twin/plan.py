"""What to expect of a job at several numbers of devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fluidtune.twin.recorded_job import Job
from fluidtune.twin.shell import Twin


@dataclass(frozen=True)
class Forecast:
    """``makespan`` s; ``device_hours``: what the devices cost, idle or not; ``utilisation``: the part held, 0 to 1."""

    devices: int
    makespan: float
    device_hours: float
    utilisation: float
    resizes: int
    packing: int


def forecast(job: Job, devices: int) -> Forecast:
    """One run of the twin."""
    twin = Twin(job, devices)
    makespan = twin.run()
    hours = makespan * devices / 3600
    return Forecast(devices, makespan, hours, twin.utilisation, twin.resizes, twin.engine.c)


def forecasts(job: Job, sizes: Iterable[int]) -> list[Forecast]:
    """The same at each of ``sizes``, ascending."""
    return [forecast(job, size) for size in sorted(set(sizes))]
