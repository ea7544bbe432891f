"""ASHA, with or without a searcher. The asynchronous form of BOHB is ASHA with a TPE searcher."""

from __future__ import annotations

from ray.tune.experiment import Trial

from fluidtune.ray_compat.schedulers import asha_limit, time_attribute
from fluidtune.tune.groups.adapter import Adapter, Membership
from fluidtune.tune.groups.budgets import iteration_at, stop_iteration


class ASHAAdapter(Adapter):
    """One stream. A trial's budget ends with the last rung, because the trial may reach it."""

    def mapped(self, trial: Trial) -> Membership:
        counted = time_attribute(self._base)
        limits = (iteration_at(trial, counted, asha_limit(self._base)), stop_iteration(trial, counted))
        return Membership("stream", False, min((value for value in limits if value is not None), default=None))
