"""Which run and which trial a user means, by a directory and by an id, the beginning of an id, or a name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fluidtune.errors import FluidTuneError
from fluidtune.report.events import EVENT_LOG_NAME, NoEventLogError, find_log
from fluidtune.report.fold import Run, fold_of
from fluidtune.report.terminal_text import printable

#: An error lists this many runs or trials. More would hide the error.
LISTED = 20


class UnknownTrialError(FluidTuneError):
    """No trial of the run, or more than one, is what the user has named."""


def log_of_run(run_dir: str | os.PathLike[str]) -> Path:
    """The event log of the run in ``run_dir``, or that path itself if it is a log.

    Raises `NoEventLogError`, which lists the runs that are near.
    """
    path = Path(run_dir)
    try:
        return find_log(path)
    except NoEventLogError:
        what = "no event log in the directory" if path.is_dir() else "no directory"
        near = path if path.is_dir() else path.parent
        runs = sorted(log.parent for log in near.glob(f"*/{EVENT_LOG_NAME}")) if near.is_dir() else []
        there = f"there are runs in {_listed([str(run) for run in runs])}" if runs else f"{str(near)!r} has no runs"
        raise NoEventLogError(f"there is {what} {str(path)!r}; {there}")


def find_trial(run: Run, wanted: str) -> str:
    """The id of the trial that ``wanted`` names: its id, its name, or the beginning of the id.

    Raises `UnknownTrialError` if there is no such trial or if there are several.
    """
    fold = fold_of(run)
    if fold.counts["serving_started"]:
        raise UnknownTrialError(f"{wanted!r}: this is the log of a service; give the directory of a tuning run")
    names = {name: trial.name for name, trial in fold.trials.items()}
    if not names:
        raise UnknownTrialError(f"there is no trial {wanted!r}: the log has no trials")
    return trial_called(wanted, names)


def trial_called(wanted: str, names: Mapping[str, str]) -> str:
    """The id of the trial that ``wanted`` names, as `find_trial`. ``names``: of each trial, by its id; "": not known.

    Raises `UnknownTrialError` if there is no such trial or if there are several.
    """
    if wanted in names:
        return wanted
    # In a log without names: Tune calls a trial by its trainable and its id, unless the script gives another name.
    named = [trial for trial, name in names.items() if (wanted == name if name else wanted.endswith(f"_{trial}"))]
    found = named or [trial for trial in names if wanted and trial.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownTrialError(f"{wanted!r} may be any of {len(found)} trials: {_listed(found)}")
    raise UnknownTrialError(f"there is no trial {wanted!r}; the run has {len(names)}: {_listed(list(names))}")


def _listed(what: Sequence[str]) -> str:
    more = len(what) - LISTED
    return ", ".join(map(printable, what[:LISTED])) + (f" and {more} more" if more > 0 else "")
