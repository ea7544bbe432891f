"""The median stopping rule."""

from __future__ import annotations

from ray.tune.experiment import Trial

from fluidtune.ray_compat.schedulers import time_attribute
from fluidtune.tune.groups.adapter import Adapter, Membership
from fluidtune.tune.groups.budgets import stop_iteration


class MedianStoppingAdapter(Adapter):
    """One stream: the rule may stop any trial at any result. The stop criterion is a trial's budget."""

    def mapped(self, trial: Trial) -> Membership:
        return Membership("stream", False, stop_iteration(trial, time_attribute(self._base)))
