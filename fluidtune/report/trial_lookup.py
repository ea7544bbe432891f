"""Which trial a user means, by its id, the beginning of its id, or its name."""

from __future__ import annotations

from collections.abc import Mapping

from fluidtune.errors import FluidTuneError
from fluidtune.report.fold import Run, fold_of
from fluidtune.report.terminal_text import listed


class UnknownTrialError(FluidTuneError):
    """No trial of the run, or more than one, is what the user has named."""


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
        raise UnknownTrialError(f"{wanted!r} may be any of {len(found)} trials: {listed(found)}")
    raise UnknownTrialError(f"there is no trial {wanted!r}; the run has {len(names)}: {listed(list(names))}")
