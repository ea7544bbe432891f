"""How far a run is from the least makespan that any schedule of its work could have had.

The bound is computed by `fluidtune.twin.least_makespan` from the run's event log: its iterations, its groups, and the
speeds and start-up costs that it measured itself. This module decides for which logs there is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fluidtune.profiles import ProfileError
from fluidtune.report.events import EventDict
from fluidtune.report.occupancy import Occupancy
from fluidtune.twin import LeastMakespan, least_makespan, read_job


@dataclass(frozen=True)
class Bound(LeastMakespan):
    """``ratio``: the run's time divided by the bound's ``seconds``."""

    ratio: float


def bound_of(events: Iterable[EventDict], use: Occupancy) -> Bound | None:
    """The bound of a run with this occupancy.

    None if there is no finished iteration, or if `Tuner.restore` continued the run: what its start-ups cost cannot be
    told apart from iterations that ran again. The bound is for the most devices that the run had at one moment.
    """
    listed = list(events)
    trials = {event["trial"] for event in listed if event["event"] == "trial_added"}
    results = [event for event in listed if event["event"] == "trial_result"]
    strange = any(event["trial"] not in trials or not event["seconds"] for event in results)
    if strange or len(use.drivers) != 1 or use.wall_seconds <= 0:
        return None
    try:
        job = read_job(listed)
    except ProfileError:
        return None
    found = least_makespan(job, _most_devices(use))
    if not found.seconds:
        return None
    return Bound(found.seconds, found.path_seconds, found.area_seconds, use.wall_seconds / found.seconds)


def _most_devices(use: Occupancy) -> int:
    """The most devices that the run had at one moment."""
    spans = [span for found in use.available.values() for span in found]
    # One that ends at the moment when another begins is not there together with it.
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = count = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    return max(1, most)
