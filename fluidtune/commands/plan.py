"""What `fluidtune plan` reads, prints and draws. The twin computes the predictions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fluidtune.errors import FluidTuneError
from fluidtune.profiles import Profile
from fluidtune.report import find_log
from fluidtune.report.drawing import OTHER, OURS, new_figure, polish_axes, save_png, time_unit
from fluidtune.report.fold import fold_of
from fluidtune.report.recorded import read_job
from fluidtune.report.summary import duration, plural
from fluidtune.report.terminal_text import cell
from fluidtune.twin import Forecast, RecordedJob, grid

if TYPE_CHECKING:
    from rich.console import RenderableType

#: A profile alone is planned as a grid of this many trials of this many iterations: a usual small search.
TRIALS = ITERATIONS = 27


def job_of(source: str, trials: int | None = None, iterations: int | None = None) -> tuple[RecordedJob, int]:
    """The job in a run's event log, or a grid of ``trials`` trials with the profile in a file; and the lines left out.

    ``source``: a run's directory, its event log (``*.jsonl``), or a profile's file. Raises FluidTuneError if it is
    none of these, or if ``trials`` or ``iterations`` are given with a run, whose log has them.
    """
    path = Path(source)
    if path.is_dir() or path.suffix == ".jsonl":
        log = find_log(path)
        if trials is not None or iterations is not None:
            raise FluidTuneError("--trials and --iterations are for a profile; a run has trials of its own")
        fold = fold_of(log)
        return read_job(fold), fold.dropped
    count, length = (TRIALS if trials is None else trials), (ITERATIONS if iterations is None else iterations)
    if count < 1 or length < 1:
        raise FluidTuneError(f"{count} trials of {length} iterations are no job; give 1 or more of each")
    return grid(count, length, Profile.load(path)), 0


def counts_held(job: RecordedJob, counts: Sequence[int]) -> list[int]:
    """Those of the numbers of devices on which each trial can run.

    Raises FluidTuneError if none is: a trial needs more devices than any of them.
    """
    needed = job.widest
    held = [count for count in counts if count >= needed]
    if not held:
        given = ", ".join(map(str, counts))
        raise FluidTuneError(
            f"a trial of this run needs {needed} devices, and --devices is {given}; give {needed} or more"
        )
    return held


def _title(job: RecordedJob) -> str:
    return f"{plural(len(job.trials), 'trial')} of {job.profile.name!r}, predicted by the twin"


def render_plan(job: RecordedJob, found: Sequence[Forecast]) -> RenderableType:
    """The forecasts as a table for `rich`, one row per number of devices."""
    from rich.table import Table

    table = Table(title=cell(_title(job)), title_justify="left")
    for name in ("devices", "time", "device-hours", "held", "resizes", "packed"):
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(
            str(one.devices),
            duration(one.makespan),
            f"{one.device_hours:.3g}",
            f"{one.held:.0%}",
            str(one.resizes),
            str(one.packing),
        )
    return table


def plan_png(job: RecordedJob, found: Sequence[Forecast], out: str | os.PathLike[str]) -> Path:
    """Draw predicted time and the held part of the devices over the number of devices. Returns the PNG's path."""
    unit, name = time_unit(max(one.makespan for one in found))
    figure = new_figure(9.0, 3.6)
    left, right = figure.subplots(1, 2)
    counts = [one.devices for one in found]
    ideal = [found[0].makespan * counts[0] / count / unit for count in counts]
    left.plot(counts, [one.makespan / unit for one in found], "o-", color=OURS, label="predicted")
    left.plot(counts, ideal, ":", color=OTHER, label=f"the work on {plural(counts[0], 'device')}, divided")
    left.set_ylim(bottom=0)
    left.set_ylabel(f"time ({name})")
    left.legend(frameon=False)
    right.plot(counts, [100 * one.held for one in found], "o-", color=OURS)
    right.set_ylim(0, 105)
    right.set_ylabel("devices held (%)")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xlabel("devices")
        polish_axes(axes)
    figure.suptitle(_title(job))
    return save_png(figure, out)
