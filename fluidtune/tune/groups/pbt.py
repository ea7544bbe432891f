"""Population-based training and PB2."""

from __future__ import annotations

from typing import Any

from ray.tune.experiment import Trial

from fluidtune.ray_compat import schedulers
from fluidtune.tune.groups.adapter import Adapter, Membership
from fluidtune.tune.groups.budgets import earliest, iteration_at, stop_iteration


class PBTAdapter(Adapter):
    """Synchronous: one batch for each perturbation interval. Asynchronous: the population is one batch.

    Without ``synch`` a trial does not wait at its perturbation, so that the stop criterion is its budget. If the
    population does not fit on the devices, the algorithm pauses the trial at its perturbation in favour of trials that
    have trained fewer. That is also the engine's order: the trial with the most iterations left goes first.
    """

    synchronous = True
    no_keep = "the algorithm stops no trial: it gives a weak one the state of a strong one"

    def mapped(self, trial: Trial) -> Membership:
        base = self._base
        counted = schedulers.time_attribute(base)
        stop = stop_iteration(trial, counted)
        if not schedulers.perturbs_together(base):
            return Membership("population", True, stop)
        perturbation = schedulers.next_perturbation(base)
        interval = int(perturbation // schedulers.perturbation_interval(base))
        until = iteration_at(trial, counted, perturbation)
        rest = stop - until if stop is not None and until is not None else 0.0
        size = schedulers.population_size(base)
        rungs = ((size, rest),) if size and rest > 0 else ()
        return Membership(f"interval{interval}", True, earliest(until, stop), rungs=rungs)

    def promoted(self) -> list[Trial]:
        """Return the whole population after a perturbation; the algorithm would return one trial after the other."""
        if not schedulers.perturbs_together(self._base):
            return []  # the algorithm pauses one trial in favour of another, and chooses that one itself
        due = schedulers.trials_before_perturbation(self._base)
        return [trial for trial in due if trial.status == Trial.PAUSED]

    def last_result(self, controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        # The others wait, paused, until every trial has come to the perturbation.
        if schedulers.perturbs_together(self._base):
            self._base.on_trial_result(controller, trial, result)
