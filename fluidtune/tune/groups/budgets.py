"""Converts budgets into iterations, whatever attribute the script counts in.

A budget in another attribute (``time_attr="epochs"``, ``stop={"time_total_s": 60}``) is converted at the rate of the
trial's last result: the attribute's value there, divided by the iterations. It is an estimate until the trial ends, and
every result corrects it.
"""

from __future__ import annotations

import math
from typing import Any

from ray.tune.experiment import Trial

from fluidtune.ray_compat.trainable import EPISODES_TOTAL, TIME_TOTAL_S, TIMESTEPS_TOTAL, TRAINING_ITERATION
from fluidtune.report.metric_values import value_of

#: Stop criteria that grow evenly with a trial's iterations: Tune's own counters. It cannot be told when a
#: trial reaches another criterion, such as the threshold of a metric.
_GROWING = (TIME_TOTAL_S, TIMESTEPS_TOTAL, EPISODES_TOTAL)
#: A part of an iteration: the quotient of two counts has a far smaller rounding error.
_ROUNDING = 1e-9


def earliest(*iterations: float | None) -> float | None:
    """The first of these iterations, of which some may not be known; None: none is."""
    return min((value for value in iterations if value is not None), default=None)


def iteration_at(trial: Trial, attribute: str, value: float | None) -> float | None:
    """Return the iteration at which ``attribute`` will have reached ``value``; None: it cannot be told yet."""
    if value is None or not math.isfinite(value):
        return None
    if attribute == TRAINING_ITERATION:
        return float(value)
    last: dict[str, Any] = trial.last_result or {}
    done, counted = last.get(TRAINING_ITERATION), value_of(last, attribute)
    if not done or counted is None or counted <= 0:
        return None
    return float(math.ceil(value / (counted / done) - _ROUNDING))


def stop_iteration(trial: Trial, attribute: str | None = None) -> float | None:
    """Return the iteration at which the script's stop criterion ends the trial; None: it cannot be told.

    ``attribute``: the attribute in which the algorithm counts. It is taken to grow evenly, too.
    """
    criterion = trial.stopping_criterion
    if isinstance(criterion, dict):
        names = (TRAINING_ITERATION, *_GROWING, *filter(None, [attribute]))
        found = [iteration_at(trial, name, criterion[name]) for name in names if criterion.get(name) is not None]
        return earliest(*found)
    return None
