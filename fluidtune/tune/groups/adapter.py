"""`Membership` is what an adapter or `announce` says of a trial. Here are the adapters of algorithms without rungs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat.schedulers import asha_limit, time_attribute
from fluidtune.tune.groups.budgets import earliest, iteration_at, stop_iteration


@dataclass(frozen=True)
class Membership:
    """The TrialGroup of a trial, and the trial's budget in it.

    Args:
        group: the name of the group.
        synchronous: the group is a batch whose makespan counts; False: it is a stream.
        target: the iteration at which the trial's current budget ends; None: not known.
        tail: iterations that the group's best trials will train after ``target``.
        rungs: the known batches that follow the group, in order: (number of trials, iterations of each trial).
        turn: of a batch whose trials go on in turn, lowest first; an adapter says 0. None: the most to do goes first.
    """

    group: str
    synchronous: bool
    target: float | None
    tail: float = 0.0
    rungs: tuple[tuple[int, float], ...] = ()
    turn: int | None = None


#: The latest announcement of each trial.
_announced: WeakKeyDictionary[Trial, Membership] = WeakKeyDictionary()


def announce(
    name: str,
    trials: Iterable[Trial],
    *,
    until: float | None = None,
    synchronous: bool = True,
    tail: float = 0.0,
) -> None:
    """Declare that these trials form a TrialGroup: the paper's interface for the authors of algorithms.

    A Ray Tune scheduler calls this whenever it forms a group.

    A trial belongs to the group of its latest announcement. It joins that group when it next starts or resumes. Under
    stock Ray Tune the call has no effect.

    Args:
        name: the name of the group. A second announcement of the same name adds trials to the group.
        trials: the trials, as Tune handed them to the scheduler.
        until: the iteration (``training_iteration``) at which their budget ends; None: not known.
        synchronous: the group is a batch whose makespan counts. False: it is a stream, served in order of arrival.
        tail: iterations that the best trials will train after this group has ended. Batches with a longer tail are
            started first.

    Raises:
        FluidTuneError: ``until`` or ``tail`` is not a number of iterations, or an element of ``trials`` is not a trial.
    """
    for what, value in (("until", until), ("tail", tail)):
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
            raise FluidTuneError(f"announce({name!r}): {what}={value!r} is not a number of iterations, 0 or more")
    for trial in trials:
        if not isinstance(trial, Trial):
            raise FluidTuneError(f"announce({name!r}): {trial!r} is not a ray.tune Trial")
        _announced[trial] = Membership(name, synchronous, until, tail, ((1, tail),) if tail else ())


class Adapter:
    """For any scheduler: one stream; the stop criterion is a trial's budget. What was announced has precedence."""

    synchronous = False
    #: The algorithm may ask for a trial's checkpoint by itself, and wait for the future that it gets.
    waits_for_checkpoints = True
    #: Why no trial goes on that the algorithm wants to stop, though a user asks for that; "": it does. A trial that
    #: goes on has ended for the algorithm, so that the algorithm must stop a trial by its answer to the trial's result.
    no_keep = "FluidTune does not know how this algorithm stops trials"

    def __init__(self, base: TrialScheduler):
        self._base: Any = base

    def membership(self, trial: Trial) -> Membership:
        """Return the trial's group and budget at this moment."""
        said = _announced.get(trial)
        if said is None:
            return self.mapped(trial)
        return replace(said, target=earliest(said.target, stop_iteration(trial)))

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

    def last_result(self, controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Tell the algorithm a result at which a user ends the trial, if others wait for that result."""


class FIFOAdapter(Adapter):
    """Grid search, random search, and any `Searcher` without a scheduler: one batch.

    Nothing is decided before its trials have ended. A searcher's trials join it one by one.
    """

    synchronous = True
    waits_for_checkpoints = False
    no_keep = "the algorithm stops no trial"


class ReplayAdapter(FIFOAdapter):
    """`PopulationBasedTrainingReplay`, the replay of one trial of a population: one batch, of one trial."""

    waits_for_checkpoints = True


class ASHAAdapter(Adapter):
    """ASHA, with or without a searcher: one stream. A trial's budget ends with the last rung, which it may reach.

    The asynchronous form of BOHB is ASHA with a TPE searcher.
    """

    waits_for_checkpoints = False
    no_keep = ""

    def mapped(self, trial: Trial) -> Membership:
        counted = time_attribute(self._base)
        limit = iteration_at(trial, counted, asha_limit(self._base))
        return Membership("stream", False, earliest(limit, stop_iteration(trial, counted)))


class MedianStoppingAdapter(Adapter):
    """The median stopping rule: one stream, because it may stop any trial at any result. Stopping is the budget."""

    waits_for_checkpoints = False
    no_keep = ""

    def mapped(self, trial: Trial) -> Membership:
        return Membership("stream", False, stop_iteration(trial, time_attribute(self._base)))
