"""What is not known exactly of a trial, estimated from what was measured: iterations left, seconds, heights, widths.

Nothing is decided and nothing is changed here. Where a trial was not measured, trials that share hyperparameters with
it, its group and the whole job are asked, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fluidtune.engine.speed import TRUSTED, scaled
from fluidtune.engine.state import State
from fluidtune.engine.trial import Group, Trial

#: Weight, in a trial's path, of an iteration of a later rung relative to one of the present rung. docs/architecture.md
#: ("Longest path first") says what else was tried.
TAIL = 1.1


def iterations_left(trial: Trial) -> float:
    """Iterations to come.

    If that is unknown, the trial is taken to end where the finished trials of its group did, or to have done half.
    """
    if trial.iterations is not None:
        return trial.iterations
    total = trial.group.speed.total_iterations()
    if total is not None and total > trial.done:
        return total - trial.done
    return max(trial.done, 1)


def base_seconds(state: State, trial: Trial) -> float:
    """Seconds per iteration on one worker: measured, else from another width, else from other trials, else 1 s."""
    group_speed = trial.group.speed
    if trial.speed.measured:
        own = trial.speed.base_seconds()
        if own is not None:
            return own
        nearest = min(trial.speed.widths(), key=lambda width: abs(width - 1))
        return (trial.speed.seconds(nearest) or 0.0) / group_speed.ratio(nearest)
    predictor = state.predictor
    if trial.predicted_by != predictor.fits:
        trial.prediction, trial.predicted_by = predictor.predict(trial.traits), predictor.fits
    others = group_speed.base_seconds() if trial.prediction is None else trial.prediction
    return 1.0 if others is None else others


def works_left(state: State, group: Group, trials: Iterable[Trial]) -> tuple[list[float], list[float]]:
    """`iterations_left` and `base_seconds` of many trials of one group; quicker where most of them have not run."""
    predictor, others = state.predictor, group.speed.base_seconds()
    fits, common = predictor.fits, 1.0 if others is None else others
    lefts, bases = [], []
    for trial in trials:
        lefts.append(iterations_left(trial) if trial.iterations is None else trial.iterations)
        if trial.speed.measured:
            bases.append(base_seconds(state, trial))
            continue
        if trial.predicted_by != fits:
            trial.prediction, trial.predicted_by = predictor.predict(trial.traits), fits
        bases.append(common if trial.prediction is None else trial.prediction)
    return lefts, bases


def height(state: State, trial: Trial) -> float:
    """Seconds left on one worker (h_i,1 of eq. 3.2)."""
    return iterations_left(trial) * base_seconds(state, trial)


def path(state: State, trial: Trial) -> float:
    """Seconds left on one worker to the end of all rungs that follow its group, should it be among the best."""
    return (iterations_left(trial) + TAIL * trial.group.tail) * base_seconds(state, trial)


def seconds_left(state: State, trial: Trial, width: float) -> float:
    """Seconds left at ``width``: as measured there, else by its own beta, else by its group's ratio.

    Infinity at width 0.
    """
    if width <= 0:
        return math.inf
    seconds = trial.speed.seconds(width)
    if seconds is None or (width != current_width(state, trial) and trial.speed.count(width) < TRUSTED):
        beta = trial.speed.beta()
        ratio = scaled(beta, width) if beta is not None and width > 1 else trial.group.speed.ratio(width)
        seconds = base_seconds(state, trial) * ratio
    return iterations_left(trial) * seconds


def current_width(state: State, trial: Trial) -> float:
    """The width that a trial with devices really runs at.

    Alone on a shared device it has all of it. Beside others it has an equal share, or what the lane policy gives it,
    which is 0 if the policy lets others go first.
    """
    if len(trial.devices) != 1:
        return len(trial.devices)
    tenants = state.devices.tenants[trial.devices[0]]
    if state.sharing is None or len(tenants) == 1:
        return 1 / len(tenants)
    heights = [(state.trials[name], height(state, state.trials[name])) for name in tenants]
    return state.sharing.share_of(trial, trial.devices[0], heights)


def scaling_overhead(trial: Trial) -> float:
    """beta (eq. 3.2): the trial's own if it was measured, else its group's."""
    own = trial.speed.beta()
    return own if own is not None else trial.group.speed.beta


def knows_scaling(trial: Trial) -> bool:
    """Whether its beta was measured, by itself or by others of its group."""
    return trial.speed.beta() is not None or trial.group.speed.knows_scaling()
