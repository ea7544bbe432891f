"""The state of Tune's algorithms and stoppers that their owners keep private."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import AsyncHyperBandScheduler, HyperBandForBOHB, HyperBandScheduler
from ray.tune.stopper import CombinedStopper, MaximumIterationStopper


def mode(scheduler: Any) -> str | None:
    """Return "min" or "max", whichever the script gave to the algorithm; None: it gave neither."""
    return getattr(scheduler, "_mode", None)


def time_attribute(scheduler: Any) -> str:
    """Return the key of a result in which ASHA, HyperBand, PBT or the median stopping rule counts."""
    return scheduler._time_attr


def asha_limit(asha: Any) -> float:
    """Return how long ASHA lets a trial train, in its time attribute."""
    return asha._max_t


def limit_of(scheduler: Any) -> tuple[str | None, float | None]:
    """Return in which attribute the algorithm limits a trial, and the limit, None where it cannot be raised."""
    if isinstance(scheduler, AsyncHyperBandScheduler):
        return (scheduler._time_attr, scheduler._max_t) if scheduler._stop_last_trials else (None, None)
    return (scheduler._time_attr, None) if isinstance(scheduler, HyperBandScheduler) else (None, None)


def raise_limit(asha: Any, until: Mapping[str, float]) -> None:
    """Have ASHA let trials train up to its attribute's value in ``until``. The rungs that it has stay.

    A trial that was in a bracket before is in that one. Other algorithms have nothing to be raised.
    """
    counted, limit = limit_of(asha)
    if limit is None or counted is None or counted not in until:
        return
    asha._max_t = max(limit, until[counted])
    for bracket in asha._brackets:
        while bracket._rungs and bracket._rungs[0][0] * bracket.rf <= asha._max_t:
            bracket._rungs.insert(0, (bracket._rungs[0][0] * bracket.rf, {}))
    for trial in asha._trial_info:
        known = [bracket for bracket in asha._brackets if any(trial in scores for _, scores in bracket._rungs)]
        asha._trial_info[trial] = known[0] if known else asha._trial_info[trial]


@dataclass(frozen=True)
class Bracket:
    """One bracket of a HyperBand scheduler, as it is now.

    ``band``, ``index``: its place in the scheduler's table of brackets. ``competing``: how many trials compete in it at
    most: the number that is planned, or fewer when fewer came. ``halvings_left``: how often it will be halved yet. A
    halving keeps one of ``reduction_factor`` trials, which may train this many times as long. ``rung_end``, ``limit``:
    where the present rung ends, and the last one at the latest, in the scheduler's time attribute.
    """

    band: int
    index: int
    competing: int
    halvings_left: int
    reduction_factor: float
    rung_end: float
    limit: float
    _bracket: Any

    def holds(self, trial: Trial) -> bool:
        """Return whether the trial still competes in this bracket."""
        return trial in self._bracket._live_trials

    def promoted(self) -> list[Trial]:
        """Return the trials that the last halving kept and that still stand paused."""
        waiting = self._bracket.trials_to_unpause
        return [trial for trial in self._paused() if trial in waiting]

    def left_over(self) -> list[Trial]:
        """Return the paused trials of a bracket that has finished: it will neither promote nor stop them."""
        return self._paused() if self._bracket.finished() else []

    def stands_still(self) -> bool:
        """Return whether all its trials wait, in the middle, for a halving that the scheduler has missed."""
        trials = self._bracket.current_trials()
        over = self._bracket.cur_iter_done() and not self._bracket.finished()
        return bool(trials) and over and len(self._paused()) == len(trials)

    def _paused(self) -> list[Trial]:
        return [trial for trial in self._bracket.current_trials() if trial.status == Trial.PAUSED]


def brackets(hyperband: Any) -> Iterator[Bracket]:
    """Return the brackets of a HyperBand scheduler that have trials, band by band."""
    for band, row in enumerate(hyperband._hyperbands):
        for index, each in enumerate(row):
            if each is not None:
                competing = min(each._n, len(each._live_trials))
                now = competing, each._halves, each._eta, each._cumul_r, each._max_t_attr
                yield Bracket(band, index, *now, each)


def make_missed_halvings(hyperband: Any, controller: Any) -> None:
    """Halve each bracket that waits for it in vain. ``controller``: as a scheduler is handed it.

    HyperBand marks a bracket at its first halving and leaves the mark (ray-project/ray#36568). Because of the mark it
    does not look at the bracket any more when a trial fails or ends by itself, though it may be the last one that the
    others of a rung wait for. HyperBandForBOHB looks at its brackets by itself when no trial runs.
    """
    if not isinstance(hyperband, HyperBandForBOHB):
        for bracket in brackets(hyperband):
            if bracket.stands_still():
                hyperband._process_bracket(controller, bracket._bracket)


def next_perturbation(pbt: Any) -> tuple[float, int] | None:
    """Return where all wait for the next perturbation, in PBT's time attribute, and after how many intervals that is.

    None: the trials of the population do not wait for each other (``synch=False``).
    """
    due = pbt._next_perturbation_sync
    return (due, int(due // pbt._perturbation_interval)) if pbt._synch else None


def population(pbt: Any) -> dict[Trial, float]:
    """Return how far each trial of the population had trained at its last perturbation, in PBT's time attribute."""
    return {trial: state.last_train_time for trial, state in pbt._trial_state.items()}


def stopper_iteration(stopper: Any) -> float | None:
    """Return the iteration at which a stopper object of Ray Tune ends every trial; None: it cannot be told."""
    if isinstance(stopper, MaximumIterationStopper):
        return float(stopper._max_iter)
    each = map(stopper_iteration, stopper._stoppers) if isinstance(stopper, CombinedStopper) else ()
    return min((found for found in each if found is not None), default=None)
