"""`Membership` is what an adapter says about a trial. Here are the adapters of algorithms whose groups never change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from fluidtune.ray_compat.schedulers import asha_limit, time_attribute
from fluidtune.tune.groups import announced
from fluidtune.tune.groups.budgets import iteration_at, stop_iteration


@dataclass(frozen=True)
class Membership:
    """The TrialGroup of a trial, and the trial's budget in it.

    Args:
        group: the name of the group.
        synchronous: the group is a batch whose makespan counts; False: it is a stream.
        target: the iteration at which the trial's current budget ends; None: not known.
        tail: iterations that the group's best trials will train after ``target``.
        rungs: the known batches that follow the group, in order: (number of trials, iterations of each trial).
    """

    group: str
    synchronous: bool
    target: float | None
    tail: float = 0.0
    rungs: tuple[tuple[int, float], ...] = ()


class Adapter:
    """For any scheduler: one stream; the stop criterion is a trial's budget. What was announced has precedence."""

    synchronous = False

    def __init__(self, base: TrialScheduler):
        self._base: Any = base

    def membership(self, trial: Trial) -> Membership:
        """Return the trial's group and budget at this moment."""
        said = announced.about(trial)
        if said is None:
            return self.mapped(trial)
        stop = stop_iteration(trial)
        known = [value for value in (said.until, stop) if value is not None]
        rungs = ((1, said.tail),) if said.tail else ()
        return Membership(said.group, said.synchronous, min(known, default=None), said.tail, rungs)

    def mapped(self, trial: Trial) -> Membership:
        """Return the group and budget that follow from the algorithm's own state."""
        return Membership("all", self.synchronous, stop_iteration(trial))

    def promoted(self) -> list[Trial]:
        """Return the paused trials that the algorithm has promoted; it returns only one when Tune asks it to choose."""
        return []

    def catch_up(self, controller: Any) -> None:
        """Have the algorithm decide what it has missed to decide. ``controller``: as a scheduler is handed it."""

    def overlooked(self) -> list[Trial]:
        """Return the paused trials that the algorithm has finished with and will never stop itself."""
        return []


class FIFOAdapter(Adapter):
    """Grid search, random search, and any `Searcher` without a scheduler: one batch.

    Nothing is decided before its trials have ended. A searcher's trials join it one by one.
    """

    synchronous = True


class ReplayAdapter(Adapter):
    """`PopulationBasedTrainingReplay`, the replay of one trial of a population: one batch, of one trial."""

    synchronous = True


class ASHAAdapter(Adapter):
    """ASHA, with or without a searcher: one stream. A trial's budget ends with the last rung, which it may reach.

    The asynchronous form of BOHB is ASHA with a TPE searcher.
    """

    def mapped(self, trial: Trial) -> Membership:
        counted = time_attribute(self._base)
        limits = (iteration_at(trial, counted, asha_limit(self._base)), stop_iteration(trial, counted))
        return Membership("stream", False, min((value for value in limits if value is not None), default=None))


class MedianStoppingAdapter(Adapter):
    """The median stopping rule: one stream, because it may stop any trial at any result. Stopping is the budget."""

    def mapped(self, trial: Trial) -> Membership:
        return Membership("stream", False, stop_iteration(trial, time_attribute(self._base)))
