"""What to expect of a job on several numbers of devices, as the twin runs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fluidtune.twin.recorded_job import RecordedJob
from fluidtune.twin.shell import Twin


@dataclass(frozen=True)
class Forecast:
    """One run of the twin.

    ``makespan``: seconds. ``device_hours``: what the devices cost, idle or not. ``held``: the part of the
    device-seconds that trials held, 0 to 1. ``packing``: c, as given or found.
    """

    devices: int
    makespan: float
    device_hours: float
    held: float
    resizes: int
    packing: int


def forecast(job: RecordedJob, devices: int) -> Forecast:
    """One run of ``job`` on ``devices`` devices."""
    twin = Twin(job, devices)
    makespan = twin.run()
    hours = makespan * devices / 3600
    return Forecast(devices, makespan, hours, twin.held_part, twin.resizes, twin.engine.c)


def forecasts(job: RecordedJob, sizes: Iterable[int]) -> list[Forecast]:
    """One run on each of ``sizes`` devices, ascending."""
    return [forecast(job, size) for size in sorted(set(sizes))]
