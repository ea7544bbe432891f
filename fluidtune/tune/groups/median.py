"""The median stopping rule."""

from __future__ import annotations

from ray.tune.experiment import Trial

from fluidtune.ray_compat.schedulers import time_attribute
from fluidtune.tune.groups.adapter import Adapter, Membership
from fluidtune.tune.groups.budgets import stop_iteration


class MedianStoppingAdapter(Adapter):
    """A stream: any of its trials may be stopped at any result; a budget is what the stop criterion leaves."""

    def mapped(self, trial: Trial) -> Membership:
        return Membership("stream", False, stop_iteration(trial, time_attribute(self._base)))
