"""Population-based training and PB2."""

from __future__ import annotations

import math
from typing import Any

from ray.tune.experiment import Trial

from fluidtune.ray_compat import schedulers
from fluidtune.tune.groups.adapter import Adapter, Membership
from fluidtune.tune.groups.budgets import earliest, iteration_at, stop_iteration


class PBTAdapter(Adapter):
    """Synchronous: one batch for each perturbation interval. Asynchronous: the population is one batch.

    Without ``synch`` a trial does not wait at its perturbation, so that the stop criterion is its budget. If the
    population does not fit on the devices, the algorithm pauses the trial at its perturbation in favour of the others,
    which go on in turn. Which trial is exploited depends on their order: so no measured time may change it.
    """

    synchronous = True
    no_keep = "the algorithm stops no trial: it gives a weak one the state of a strong one"

    def mapped(self, trial: Trial) -> Membership:
        base = self._base
        counted = schedulers.time_attribute(base)
        stop = stop_iteration(trial, counted)
        if (due := schedulers.next_perturbation(base)) is None:
            return Membership("population", True, stop, turn=0)
        perturbation, interval = due
        until = iteration_at(trial, counted, perturbation)
        rest = stop - until if stop is not None and until is not None else 0.0
        size = len(schedulers.population(base))
        rungs = ((size, rest),) if size and rest > 0 else ()
        return Membership(f"interval{interval}", True, earliest(until, stop), rungs=rungs)

    def promoted(self) -> list[Trial]:
        """Return all that are to go on: of an asynchronous population all that are paused, of others after a
        perturbation. The algorithm would return one after the other.
        """
        due, _ = schedulers.next_perturbation(self._base) or (math.inf, 0)
        trained = schedulers.population(self._base)
        return [trial for trial, until in trained.items() if until < due and trial.status == Trial.PAUSED]

    def last_result(self, controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        # The others wait, paused, until every trial has come to the perturbation.
        if schedulers.next_perturbation(self._base) is not None:
            self._base.on_trial_result(controller, trial, result)
