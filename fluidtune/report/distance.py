"""How far a run is from the least makespan that any schedule of its work could have had.

The bound is computed by `fluidtune.twin.least_makespan` from the run's event log: its iterations, its groups, and the
speeds and start-up costs that it measured itself. This module decides for which logs there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

from fluidtune.profiles import ProfileError
from fluidtune.report.fold import Fold
from fluidtune.report.recorded import read_job
from fluidtune.twin import LeastMakespan, least_makespan


@dataclass(frozen=True)
class Bound(LeastMakespan):
    """``ratio``: the run's time divided by the bound's ``seconds``."""

    ratio: float


def bound_of(fold: Fold, wall_seconds: float) -> Bound | None:
    """The bound of a run that took so long.

    None if there is no finished iteration, or if `Tuner.restore` continued the run: what its start-ups cost cannot be
    told apart from iterations that ran again. The bound is for the most devices that the run had at one moment.
    """
    if fold.counts["run_started"] > 1 or wall_seconds <= 0 or not all(line.seconds for _, line in fold.lines()):
        return None
    try:
        job = read_job(fold)
    except ProfileError:
        return None
    found = least_makespan(job, max(1, fold.most_devices))
    if not found.seconds:
        return None
    return Bound(found.seconds, found.path_seconds, found.area_seconds, wall_seconds / found.seconds)
