"""Population-based training and PB2."""

from __future__ import annotations

from ray.tune.experiment import Trial

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
        stop = stop_iteration(trial, base._time_attr)
        if not base._synch:
            return Membership("population", True, stop)
        interval = int(base._next_perturbation_sync // base._perturbation_interval)
        until = iteration_at(trial, base._time_attr, base._next_perturbation_sync)
        known = [value for value in (until, stop) if value is not None]
        rest = stop - until if stop is not None and until is not None else 0.0
        rungs = ((len(base._trial_state), rest),) if base._trial_state and rest > 0 else ()
        return Membership(f"interval{interval}", True, min(known, default=None), rungs=rungs)

    def promoted(self) -> list[Trial]:
        """After a perturbation the whole population: the algorithm itself returns one after the other runs."""
        base = self._base
        if not base._synch:
            return []  # it pauses one in favour of another, and says which
        return [
            trial
            for trial, state in base._trial_state.items()
            if trial.status == Trial.PAUSED and state.last_train_time < base._next_perturbation_sync
        ]
