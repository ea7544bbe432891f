"""What workers' answers mean for a trial's life: each value that a call returns is one event."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from fluidtune.cluster.hosting.messages import IterationReply
from fluidtune.cluster.pool import PooledWorker
from fluidtune.cluster.sharing.lanes import Eviction
from fluidtune.ray_compat.trainable import RESULT_DUPLICATE, TRAINING_ITERATION
from fluidtune.trials import messages as m
from fluidtune.tune.trial_run import task_of


def loaded(worker: PooledWorker, value: Any) -> m.Event:
    """The worker answered ``load``: what is known of the trial, which is loaded in it, or what it lacks there."""
    return _lacking(worker, value) if isinstance(value, Eviction) else m.Loaded(worker, value)


def called(call: m.Call, value: Any) -> m.Event:
    """The leader answered a call."""
    if isinstance(value, IterationReply):
        if value.anew:
            return m.MustReschedule(call, f"it begins anew: {value.anew}")
        if value.lack is not None:
            return _lacking(call, value.lack)
        number = value.result.get(TRAINING_ITERATION, value.iteration)
        return m.IterationDone(call, value, number, final=RESULT_DUPLICATE in value.result)
    if call.method == "restore" and isinstance(value, int):
        return m.CheckpointRestored(call, value, task_of(call).args[0].metrics.get(TRAINING_ITERATION, value))
    return m.Answered(call, value)


def _lacking(by: m.Call | PooledWorker, lack: Eviction) -> m.Event:
    return m.RoomLacking(by, lack.reason, lack.need, lack.between, lack.devices)


def attached(worker: PooledWorker, value: Any, there: bool) -> m.Event:
    """A new worker answered ``attach``: it is attached (None), or says why not. ``there``: see `followed`."""
    if value is None:
        return m.Attached(worker)
    if isinstance(value, RayActorError):
        return m.NotAttached(worker, "died" if there else "over", str(value))
    return m.NotAttached(worker, "refused", _words(value))


def followed(worker: PooledWorker, value: Any, there: bool) -> m.Event:
    """A follower answered ``follow``: its part is over. ``there``: its device is still there."""
    if value is None:
        return m.FollowerEnded(worker, "over")
    if isinstance(value, RayActorError):
        return m.FollowerEnded(worker, "died" if there else "over")
    if isinstance(value, Eviction):
        return m.FollowerEnded(worker, "over", value.reason)
    return m.FollowerEnded(worker, "error", _words(value))


def _words(value: Any) -> str:
    return repr(value.cause) if isinstance(value, RayTaskError) else str(value)
