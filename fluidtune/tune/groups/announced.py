"""The paper's interface: an algorithm's author says what its TrialGroups are, in one call."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ray.tune.experiment import Trial

from fluidtune.errors import FluidTuneError


@dataclass(frozen=True)
class _Announced:
    group: str
    until: float | None
    synchronous: bool
    tail: float


_said: WeakKeyDictionary[Trial, _Announced] = WeakKeyDictionary()


def announce(
    name: str,
    trials: Iterable[Trial],
    *,
    until: float | None = None,
    synchronous: bool = True,
    tail: float = 0.0,
) -> None:
    """Say that these trials are a TrialGroup. To be called by a Ray Tune scheduler, whenever it forms one.

    A trial is of the group that it was announced with last; it comes into it when it next starts or goes on. Under
    stock Ray Tune the call does nothing.

    Args:
        name: of the group; announced again, it gets more members.
        trials: as the scheduler was handed them.
        until: the iteration (``training_iteration``) at which their budget ends; None: nobody knows.
        synchronous: a batch whose makespan counts. False: trials come and go, first come, first served.
        tail: iterations that its best trials will train after this group is over; batches with more go first.

    Raises:
        FluidTuneError: ``until`` or ``tail`` is no number of iterations, or something is no trial.
    """
    for what, value in (("until", until), ("tail", tail)):
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
            raise FluidTuneError(f"announce({name!r}): {what}={value!r} is not a number of iterations, 0 or more")
    for trial in trials:
        if not isinstance(trial, Trial):
            raise FluidTuneError(f"announce({name!r}): {trial!r} is not a ray.tune Trial")
        _said[trial] = _Announced(name, until, synchronous, tail)


def about(trial: Trial) -> _Announced | None:
    """What was announced of this trial last."""
    return _said.get(trial)
