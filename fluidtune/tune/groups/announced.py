"""The paper's interface for algorithms: the author of an algorithm names its TrialGroups, in one call."""

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
    """Declare that these trials form a TrialGroup. A Ray Tune scheduler calls this whenever it forms a group.

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
        _said[trial] = _Announced(name, until, synchronous, tail)


def about(trial: Trial) -> _Announced | None:
    """Return the latest announcement of this trial; None: there is none."""
    return _said.get(trial)
