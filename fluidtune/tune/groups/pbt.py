"""Population-based training and PB2."""

from __future__ import annotations

from ray.tune.experiment import Trial

from fluidtune.ray_compat import schedulers
from fluidtune.tune.groups.adapter import Adapter, Membership
from fluidtune.tune.groups.budgets import iteration_at, stop_iteration


class PBTAdapter(Adapter):
    """Synchronous: a batch for every perturbation interval. Asynchronous: the population is one batch.

    Without ``synch`` a trial that comes to its perturbation goes on at once, so that its budget is what the stop
    criterion leaves; where the population does not fit, the algorithm pauses it there for others, which then have
    had fewer iterations: largest first is what it wants, too.
    """

    synchronous = True

    def mapped(self, trial: Trial) -> Membership:
        base = self._base
        counted = schedulers.time_attribute(base)
        stop = stop_iteration(trial, counted)
        if not schedulers.perturbs_together(base):
            return Membership("population", True, stop)
        perturbation = schedulers.next_perturbation(base)
        interval = int(perturbation // schedulers.perturbation_interval(base))
        until = iteration_at(trial, counted, perturbation)
        known = [value for value in (until, stop) if value is not None]
        rest = stop - until if stop is not None and until is not None else 0.0
        size = schedulers.population_size(base)
        rungs = ((size, rest),) if size and rest > 0 else ()
        return Membership(f"interval{interval}", True, min(known, default=None), rungs=rungs)

    def promoted(self) -> list[Trial]:
        """After a perturbation the whole population: the algorithm itself returns one after the other runs."""
        if not schedulers.perturbs_together(self._base):
            return []  # it pauses one in favour of another, and says which
        due = schedulers.trials_before_perturbation(self._base)
        return [trial for trial in due if trial.status == Trial.PAUSED]
