"""What the parts of one actor manager share: `TrialLeaders`, `TrialRecovery` and `Resizer` are each made with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fluidtune.engine import messages as m
from fluidtune.ray_compat.controller import ActorManager
from fluidtune.tune.ray_calls import RayCalls
from fluidtune.tune.run_table import RunTable
from fluidtune.tune.tune_callbacks import TuneCallbacks
from fluidtune.tune.tuning_job import TuningJob
from fluidtune.tune.worker_dispatch import WorkerDispatch


@dataclass(frozen=True)
class ManagerParts:
    """The manager makes one, for its whole life."""

    job: TuningJob
    #: The manager, as Tune sees it.
    actors: ActorManager
    runs: RunTable
    calls: RayCalls
    callbacks: TuneCallbacks
    dispatch: WorkerDispatch
    #: Hands an event to the engine, with the next batch.
    emit: Callable[[m.Event], None]
