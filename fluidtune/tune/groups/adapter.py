"""What an adapter says about a trial, and what any algorithm without one is taken for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from fluidtune.tune.groups import announced
from fluidtune.tune.groups.budgets import stop_iteration


@dataclass(frozen=True)
class Membership:
    """``target``: the iteration at which the trial's current budget ends, None when nobody knows.

    ``tail``: iterations that the group's best trials will train after that. ``rungs``: the batches that follow the
    group, one after the other, as far as they are known: how many trials, and for how many iterations each.
    """

    group: str
    synchronous: bool
    target: float | None
    tail: float = 0.0
    rungs: tuple[tuple[int, float], ...] = ()


class Adapter:
    """Any scheduler: one stream, budget from the stop criterion; what its author announced comes first."""

    synchronous = False

    def __init__(self, base: TrialScheduler):
        self._base: Any = base

    def membership(self, trial: Trial) -> Membership:
        """The trial's group and budget at this moment."""
        said = announced.about(trial)
        if said is None:
            return self.mapped(trial)
        stop = stop_iteration(trial)
        known = [value for value in (said.until, stop) if value is not None]
        rungs = ((1, said.tail),) if said.tail else ()
        return Membership(said.group, said.synchronous, min(known, default=None), said.tail, rungs)

    def mapped(self, trial: Trial) -> Membership:
        """The same, as the algorithm's own state says it."""
        return Membership("all", self.synchronous, stop_iteration(trial))

    def promoted(self) -> list[Trial]:
        """Paused trials that the algorithm lets go on, beyond the one that it returns when asked to choose."""
        return []

    def overlooked(self) -> list[Trial]:
        """Paused trials that the algorithm has done with and will never stop itself."""
        return []
