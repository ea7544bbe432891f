"""Budgets in iterations, whatever the script counts in.

A budget in another attribute (``time_attr="epochs"``, ``stop={"time_total_s": 60}``) is read off the trial's own
last result: so much of the attribute so far in so many iterations. It is an estimate, corrected with every result.
"""

from __future__ import annotations

import math
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.stopper import CombinedStopper, MaximumIterationStopper

from fluidtune.ray_compat.schedulers import combined_stoppers, max_iteration
from fluidtune.ray_compat.trainable import TIME_TOTAL_S, TRAINING_ITERATION

#: Stop criteria that grow evenly with a trial's iterations; others (a metric's threshold) say nothing about when.
_GROWING = (TIME_TOTAL_S, "timesteps_total", "episodes_total")


def iteration_at(trial: Trial, attribute: str, value: float | None) -> float | None:
    """The iteration at which ``attribute`` will have come to ``value``; None while nobody can tell."""
    if value is None or not math.isfinite(value):
        return None
    if attribute == TRAINING_ITERATION:
        return float(value)
    last: dict[str, Any] = trial.last_result or {}
    done, counted = last.get(TRAINING_ITERATION), last.get(attribute)
    if not done or not isinstance(counted, (int, float)) or not math.isfinite(counted) or counted <= 0:
        return None
    return float(math.ceil(value / (counted / done) - 1e-9))


def stop_iteration(trial: Trial, attribute: str | None = None) -> float | None:
    """The iteration at which the script's stop criterion ends the trial, as far as can be told.

    ``attribute``: what the algorithm counts in, which then grows evenly, too.
    """
    criterion = trial.stopping_criterion
    if isinstance(criterion, dict):
        names = (TRAINING_ITERATION, *_GROWING, *filter(None, [attribute]))
        found = [iteration_at(trial, name, criterion[name]) for name in names if criterion.get(name) is not None]
        return min((value for value in found if value is not None), default=None)
    return None


def stopper_iteration(stopper: Any) -> float | None:
    """The same for one of Ray Tune's stopper objects, which count iterations themselves."""
    if isinstance(stopper, MaximumIterationStopper):
        return float(max_iteration(stopper))
    if isinstance(stopper, CombinedStopper):
        found = [stopper_iteration(one) for one in combined_stoppers(stopper)]
        return min((value for value in found if value is not None), default=None)
    return None
