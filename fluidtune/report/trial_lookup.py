"""Which trial a user means, by its id, the beginning or end of its id, or its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from fluidtune.errors import FluidTuneError
from fluidtune.report.fold import Run, fold_of
from fluidtune.report.terminal_text import listed, printable


class UnknownTrialError(FluidTuneError):
    """No trial of the run, or more than one, is what the user has named."""


def find_trial(run: Run, wanted: str) -> str:
    """The id of the trial that ``wanted`` names, see `trial_called`.

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
    """The id of the trial that ``wanted`` names. ``names``: the name of each trial by its id; "": not known.

    The first of these that a trial has: its id; its name, or a folder's name with its id in it; the number at the end
    of its id, as pictures have it; the beginning or the end of its id.

    Raises `UnknownTrialError` if there is no such trial or if there are several.
    """
    if wanted in names:
        return wanted
    # Tune calls a trial and its folder by the trainable and the id, unless the script gives other names.
    tests: tuple[Callable[[str, str], bool], ...] = (
        lambda trial, name: wanted == name or f"_{trial}_" in f"_{wanted}_",
        lambda trial, name: wanted.isdecimal() and trial.rpartition("_")[2].zfill(99) == wanted.zfill(99),
        lambda trial, name: trial.startswith(wanted) or trial.endswith(wanted),
    )
    meant = ([trial for trial in names if wanted and test(trial, names[trial])] for test in tests)
    found = next(filter(None, meant), [])
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownTrialError(f"{wanted!r} may be any of {len(found)} trials: {listed(found)}")
    raise UnknownTrialError(f"there is no trial {wanted!r}; the run has {len(names)}: {listed(list(names))}")


def short_names(trials: Sequence[str]) -> dict[str, str]:
    """Names without the prefix that all trials share: 'train_4f2e1_00007' becomes '7' beside 'train_4f2e1_00008'."""
    # The prefix that the first and the last name in sorted order share is shared by all names between them.
    pairs = zip(min(trials, default=""), max(trials, default=""), strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    # Cut after an underscore, so that 17 and 18 do not become 7 and 8, and a single trial keeps a name.
    prefix = trials[0][: trials[0].rfind("_", 0, common) + 1] if trials else ""
    names = {}
    for trial in trials:
        rest = trial[len(prefix) :]
        names[trial] = printable(rest.lstrip("0") or "0" if rest.isdigit() else rest)
    return names
