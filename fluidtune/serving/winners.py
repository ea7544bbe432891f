"""Which trials of a run are served: the best ones, as Ray Tune ranks them."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.tune import Checkpoint, ResultGrid
from ray.tune.experiment import Trial

from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat.run_state import trials_of
from fluidtune.report.events import NoEventLogError
from fluidtune.report.fold import Fold, fold_of
from fluidtune.report.metric_values import flat, ranked, value_of

#: Bytes that are looked at. Judgement: other weights differ everywhere, and gigabytes take seconds to read whole.
MARK = 1 << 20


@dataclass(frozen=True)
class Winner:
    """A trial that is served: its id, its latest checkpoint, its config, and its last value of the metric.

    Of several models in one service: the model's name in place of the id. load: its own pickled function; empty: that
    of the service. mark: of its files when they were placed (`mark_of`); empty: they may change. goes_on: the trial may
    go on, and its search then deletes the checkpoint (`held_checkpoints`).
    """

    name: str
    checkpoint: Checkpoint
    config: dict[str, Any]
    value: float | None
    load: bytes = b""
    mark: str = ""
    goes_on: bool = False


def mark_of(directory: str) -> str:
    """Another text when the files have changed, by their names, lengths, and first and last `MARK` bytes."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(one for one in Path(directory).rglob("*") if one.is_file()):
        size = path.stat().st_size
        found.update(f"{path.relative_to(directory)}\0{size}\0".encode())
        with path.open("rb") as file:
            found.update(file.read(MARK))
            file.seek(max(0, size - MARK))
            found.update(file.read(MARK))
    return found.hexdigest()


def winners(
    results: ResultGrid | str | Path,
    top: int = 1,
    metric: str | None = None,
    mode: str | None = None,
    running: bool = False,
) -> list[Winner]:
    """The best ``top`` trials that have a checkpoint, best first.

    Of a run that has ended each of them counts: Ray's last snapshot calls a trial that was stopped while it was paused
    PAUSED for ever. Of another run those count that have finished, and if ``running`` those that still run, too.

    results: what `Tuner.fit` returned, or the run's directory. metric, mode: as in `tune.TuneConfig`. None: those in
    FluidTune's event log of the run; a ResultGrid with a metric also knows its best trial. They are ranked by their
    last values, see `ranked`.

    Raises FluidTuneError if there is no such run, no metric to rank by, or no trial that can be served.
    """
    if not isinstance(top, int) or top < 1:
        raise FluidTuneError(f"top is {top!r}, expected how many trials are to be served, 1 or more")
    if mode not in (None, "min", "max"):
        raise FluidTuneError(f'mode is {mode!r}, expected "min" or "max"')
    where = run_directory(results)
    trials = _trials(where, results)
    # Who follows a search asks every few seconds, and knows all that its log says here.
    logged = Fold() if running and metric is not None and mode is not None else logged_in(where)
    trials = _servable(where, trials, running, logged)
    metric, mode = ranking(logged, metric, mode)
    if metric is None or mode is None:
        if isinstance(results, ResultGrid) and top == 1:
            best = _best(results)
            return [_winner(trial, None) for trial in trials if trial.trial_id == best] or _none(where, len(trials))
        raise FluidTuneError(f"{where} does not tell by which metric its trials are ranked; give metric and mode")
    found = ranked(((trial, value_of(trial.last_result, metric)) for trial in trials), mode)
    if not found:
        last = trials[0].last_result
        there = ", ".join(name for name, _ in flat(last) if value_of(last, name) is not None)
        raise FluidTuneError(f"no finished trial in {where} has a number {metric!r}; its results have {there}")
    return [_winner(trial, value) for trial, value in found[:top]]


def winner_named(results: ResultGrid | str | Path, trial: str, metric: str | None = None) -> Winner:
    """The trial with this id, as far as it has come. Raises FluidTuneError if there is none with a checkpoint."""
    where = run_directory(results)
    found = next((one for one in _trials(where, results) if one.trial_id == trial), None)
    if found is None or found.checkpoint is None:
        raise FluidTuneError(f"no trial {trial!r} in {where} has a checkpoint; give a trial's id")
    metric, _ = ranking(logged_in(where), metric, None)
    return _winner(found, value_of(found.last_result, metric) if metric is not None else None)


def ranking(logged: Fold, metric: str | None, mode: str | None) -> tuple[str | None, str | None]:
    """The metric and mode by which the run's trials are ranked: those that are given, else the run's, if it has any."""
    return metric or logged.head.get("metric"), mode or logged.head.get("mode")


def run_directory(results: ResultGrid | str | Path) -> str:
    """Where the run's files are: a path, or what is one on the run's own file system."""
    return results.experiment_path if isinstance(results, ResultGrid) else str(Path(results).expanduser().resolve())


def _trials(where: str, results: ResultGrid | str | Path) -> list[Trial]:
    filesystem = results.filesystem if isinstance(results, ResultGrid) else None
    try:
        return trials_of(where, filesystem)
    except Exception as error:  # Ray raises what its storage raises
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FluidTuneError(f"{where} is no run's directory ({said}); give the one that holds experiment_state-*.json")


def _servable(where: str, trials: list[Trial], running: bool, logged: Fold) -> list[Trial]:
    """Those of the run's trials that count: see `winners`."""
    found = [trial for trial in trials if trial.checkpoint is not None]
    if running or not _has_ended(logged, trials):
        found = [one for one in found if one.status == Trial.TERMINATED or (running and one.status != Trial.ERROR)]
    return found or _none(where, len(trials))


def _has_ended(logged: Fold, trials: list[Trial]) -> bool:
    """Whether the run has ended, by its event log; by Ray's last snapshot, if stock Ray Tune ran it."""
    return logged.over if logged.heard else all(trial.status != Trial.RUNNING for trial in trials)


def _none(where: str, trials: int) -> Any:
    said = f"none of the {trials} trials in {where} has finished and has a checkpoint"
    raise FluidTuneError(f"{said}; finish the run with Tuner.restore, and report a checkpoint in tune.report")


def _best(results: ResultGrid) -> str:
    try:
        return str((results.get_best_result().metrics or {})["trial_id"])
    except (ValueError, RuntimeError, KeyError):  # it has no metric of its own, or no trial reported it
        raise FluidTuneError("this ResultGrid does not tell which of its trials is best; give metric and mode")


def logged_in(where: str) -> Fold:
    """What FluidTune wrote into the run's event log; nothing, if stock Ray Tune ran it."""
    with suppress(NoEventLogError):
        return fold_of(where)
    return Fold()


def _winner(trial: Trial, value: float | None) -> Winner:
    goes_on = trial.status != Trial.TERMINATED
    return Winner(trial.trial_id, trial.checkpoint, dict(trial.config), value, goes_on=goes_on)
