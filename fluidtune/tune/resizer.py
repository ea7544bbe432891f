"""How a resize that the engine wants is done, step by step.

New workers run the trial's code up to its first boundary while the old ones train; when all of them stand
ready they are told to enter and the leader is told with its next iteration; the leader takes them in at a
boundary and says so with that iteration's result. Shrinking has no first half.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from fluidtune.cluster.pool import PooledWorker
from fluidtune.cluster.worker import LoadSpec
from fluidtune.elastic import Reform
from fluidtune.engine import messages as m
from fluidtune.tune.crew import Crew
from fluidtune.tune.trial_run import Run
from fluidtune.tune.workers import CLEAN_BROKEN_S


class Resizer:
    """``spec``: what a worker needs to host a run. ``recover``: called when a run lost one of its workers, with why
    and ``died`` or ``alive``: the device of one that is dead, or of one that lives."""

    def __init__(self, crew: Crew, spec: Callable[[Run], LoadSpec], recover: Callable[..., None]):
        self._crew = crew
        self._spec = spec
        self._recover = recover

    def begin(self, run: Run) -> None:
        """Bring the workers of an elastic trial to those of ``run.wanted``."""
        new = [device for device in run.wanted if device not in run.workers()]
        if run.address is None:
            return  # its leader has not said where to be found; asked again after its next iteration
        self._crew.job.log(
            "resize_started",
            trial=run.id,
            devices_from=list(run.workers()),
            devices_to=list(run.wanted),
            reason="grow" if len(run.wanted) > run.width else "shrink",
        )
        run.generation += 1
        generation = run.generation
        run.ready, run.awaited = set(), set(new)

        def still(device: int) -> bool:
            return run.generation == generation and device in run.awaited  # else the resize was called off

        def join(worker: PooledWorker) -> None:
            run.joining[worker.device] = worker
            future = worker.actor.join.remote(run.trainable_ref, self._spec(run))
            self._crew.track(future, partial(self._joined, run, worker))

        for device in new:
            self._crew.take(device, (), join, partial(still, device))
        if not new:
            self._all_ready(run)

    def _joined(self, run: Run, worker: PooledWorker, value: Any) -> None:
        if run.joining.get(worker.device) is not worker:
            return
        if value is None:
            run.ready.add(worker.device)
            if run.ready == run.awaited:
                self._all_ready(run)
            return
        if isinstance(value, RayActorError):
            del run.joining[worker.device]
            self._crew.lost(worker, value)
        self._cancel(run, repr(value.cause) if isinstance(value, RayTaskError) else str(value))

    def _all_ready(self, run: Run) -> None:
        assert run.address is not None
        workers = {**run.workers(), **run.joining}
        members = tuple(workers[device].name for device in run.wanted)
        reform = run.reform = Reform(run.generation, members, run.address)
        for device, worker in run.joining.items():
            run.followers[device] = worker
            self._crew.track(worker.actor.enter.remote(reform), partial(self._follower_ended, run, worker))
        run.joining, run.awaited = {}, set()

    def _cancel(self, run: Run, reason: str) -> None:
        for worker in run.joining.values():
            self._crew.clean(worker, CLEAN_BROKEN_S)
        run.joining, run.awaited, run.reform, run.reforming = {}, set(), None, False
        run.wanted = tuple(device for device in run.devices if device in run.workers())
        self._crew.job.log("resize_failed", trial=run.id, devices=list(run.wanted), reason=reason[:500])
        self._crew.events.append(m.ResizeFailed(run.id, run.wanted))

    def done(self, run: Run, generation: float, seconds: float) -> None:
        """The leader says that it has re-formed its group."""
        if generation != run.generation or not run.reforming:
            return
        run.reforming = False
        run.followers = {d: w for d, w in run.followers.items() if d in run.wanted}
        run.width, run.devices = len(run.wanted), run.wanted
        self._crew.job.resized(run, seconds)
        self._crew.events.append(m.Resized(run.id, run.wanted, seconds))

    def _follower_ended(self, run: Run, worker: PooledWorker, value: Any) -> None:
        """A follower's loop is over: it was told to leave, its group broke, or its process died."""
        died = isinstance(value, RayActorError)
        member = run.leader is not None and run.followers.get(worker.device) is worker
        if died:
            self._crew.lost(worker, value)
        else:
            self._crew.clean(worker, CLEAN_BROKEN_S)
        if member and worker.device in run.wanted:
            del run.followers[worker.device]
            others_enter = run.followers.keys() - {*run.devices, worker.device}
            if run.mends and (died or value is None) and not others_enter:
                self._go_on_without(run, worker)
            elif died:
                self._recover(run, f"worker {worker.name} died", died=worker.device)
            else:
                self._recover(run, f"worker {worker.name} left: {value}", alive=worker.device)
        elif member:
            # It was dismissed, and may serve another trial before the leader says so.
            del run.followers[worker.device]

    def _go_on_without(self, run: Run, lost: PooledWorker) -> None:
        """The others go on by themselves; the engine decides anew how wide the trial shall be.

        A resize that is under way is off: nobody enters a group with one that died.
        """
        if lost.device not in run.devices:
            self._cancel(run, f"worker {lost.name} was lost while it entered")
            return
        for worker in run.joining.values():
            self._crew.clean(worker, CLEAN_BROKEN_S)
        run.joining, run.awaited, run.reform, run.reforming = {}, set(), None, False
        run.wanted = run.devices = tuple(device for device in run.devices if device in run.workers())
        run.width = len(run.devices)
        self._crew.job.resized(run, 0.0)  # how long the others needed is part of their next iteration
        self._crew.events.append(m.WorkerLost(run.id, run.devices, lost.device))
