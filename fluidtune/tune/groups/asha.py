"""ASHA, with or without a searcher (BOHB's asynchronous form is ASHA under a TPE searcher)."""

from __future__ import annotations

from ray.tune.experiment import Trial

from fluidtune.ray_compat.schedulers import asha_limit, time_attribute
from fluidtune.tune.groups.adapter import Adapter, Membership
from fluidtune.tune.groups.budgets import iteration_at, stop_iteration


class ASHAAdapter(Adapter):
    """A stream; a trial's budget is the last rung's, because it may get there."""

    def mapped(self, trial: Trial) -> Membership:
        counted = time_attribute(self._base)
        limits = (iteration_at(trial, counted, asha_limit(self._base)), stop_iteration(trial, counted))
        return Membership("stream", False, min((value for value in limits if value is not None), default=None))
