"""How a resize that the engine wants is done, step by step.

New workers run the trial's code up to its first boundary while the old ones train. When all of them stand ready, they
are told to enter the new group, and the leader is told of it with its next iteration. At a boundary the leader takes
them in, and says so with that iteration's result. To shrink, only the leader has to be told.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from fluidtune.cluster.follower_host import NotTakenIn, Ungrowable
from fluidtune.cluster.lanes import Lack
from fluidtune.cluster.pool import PooledWorker
from fluidtune.elastic import Reform
from fluidtune.elastic.checks.verdict import Verdict
from fluidtune.engine import messages as m
from fluidtune.tune.growth_checks import GrowthChecks
from fluidtune.tune.job_log import REASON_LENGTH
from fluidtune.tune.manager_parts import ManagerParts
from fluidtune.tune.trial_recovery import TrialRecovery
from fluidtune.tune.trial_run import TrialRun
from fluidtune.tune.worker_dispatch import CLEAN_BROKEN_S, WorkerRequest

log = logging.getLogger(__name__)

#: Followers that may end by an error of their own before their trial is not grown any more. Judgement: one may be an
#: accident of its node, such as a file that is not there; what fails twice would fail at every growth.
MAX_FOLLOWER_ERRORS = 2
#: Seconds in which a new worker must come to its loop's first boundary; until then it holds a device and does nothing.
#: Judgement: the code before a loop may download data and compile; see `stall_detector.FIRST_S`.
LATE_S = 600.0


class Resizer:
    """Belongs to one manager, whose ``parts`` it shares; ``recovery`` takes over when a group breaks."""

    def __init__(self, parts: ManagerParts, recovery: TrialRecovery):
        self._job, self._calls, self._dispatch, self._emit = parts.job, parts.calls, parts.dispatch, parts.emit
        self._recovery = recovery
        self._checks = GrowthChecks()
        #: By name, new workers that run the trial's code up to its first boundary, and since when (monotonic clock).
        self._on_their_way: dict[str, tuple[TrialRun, PooledWorker, float]] = {}

    def begin_resize(self, run: TrialRun) -> None:
        """Bring the workers of an elastic trial to the devices ``run.wanted``."""
        new = [device for device in run.wanted if device not in run.members()]
        if run.address is None:
            return  # its leader has not said where to be found; asked again after its next iteration
        if self._job.out_of_reach(run):
            # It goes on from its commit, where the workers of all nodes reach it.
            run.suspend, run.suspended_for = True, "it is to have workers on a node that its leader is not reached from"
            self._job.log.write("suspend_asked", trial=run.id, reason=run.suspended_for)
            return
        assert run.why is not None
        self._job.log.resize_started(run.id, run.members(), run.wanted, run.why)
        run.generation += 1
        generation = run.generation
        run.ready, run.awaited = set(), set(new)

        def still_wanted(device: int) -> bool:
            return run.generation == generation and device in run.awaited  # else the resize was called off

        def on_worker(worker: PooledWorker) -> None:
            run.joining[worker.device] = worker
            spec = self._job.load_spec(run)
            if worker.device == new[0] and spec.emulation is None and self._checks.due():
                spec = replace(spec, rehearse=True)
            self._on_their_way[worker.name] = run, worker, time.monotonic()
            future = worker.actor.join.remote(run.trainable_ref, spec)
            self._calls.track_call(future, partial(self._worker_joined, run, worker))

        for device in new:
            self._dispatch.request_worker(WorkerRequest(device, (), on_worker, partial(still_wanted, device)))
        if not new:
            self._all_ready(run)

    def _worker_joined(self, run: TrialRun, worker: PooledWorker, value: Any) -> None:
        """A new worker answered `join`: it stands at its first boundary (None, or a verdict), or says why not."""
        self._on_their_way.pop(worker.name, None)
        if run.joining.get(worker.device) is not worker:
            return
        if isinstance(value, Verdict):
            self._checks.heard(value)
            self._job.log.write("growth_checked", trial=run.id, verdict=value.kind, reason=value.reason[:REASON_LENGTH])
            if value.kind == "differs":
                self.end_growth(run, value.reason)
                return
        if value is None or isinstance(value, Verdict):
            run.ready.add(worker.device)
            if run.ready == run.awaited:
                self._all_ready(run)
            return
        reason = repr(value.cause) if isinstance(value, RayTaskError) else str(value)
        if isinstance(value, RayActorError):
            del run.joining[worker.device]
            self._dispatch.worker_died(worker, value)
        else:
            self._count_error(run, reason)
        if run.resizing:  # else it was called off together with the growth
            self._cancel_resize(run, reason)

    def call_off_late(self, now: float) -> None:
        """Call off resizes whose new workers do not come to their loop's first boundary. ``now``: monotonic clock."""
        for run, worker, since in list(self._on_their_way.values()):
            if run.joining.get(worker.device) is not worker:
                del self._on_their_way[worker.name]
            elif now - since > LATE_S:
                del self._on_their_way[worker.name]
                reason = f"a new worker has not come to its loop's first boundary in {LATE_S:.0f} s"
                log.warning("trial %s does not grow now: %s", run.id, reason)
                self._count_error(run, reason)
                if run.resizing:
                    self._cancel_resize(run, reason)

    def _all_ready(self, run: TrialRun) -> None:
        """Let the new workers enter the group; the leader is told with its next iteration."""
        assert run.address is not None
        workers = {**run.members(), **run.joining}
        members = tuple(workers[device].name for device in run.wanted)
        reform = run.reform = Reform(run.generation, members, run.address)
        for device, worker in run.joining.items():
            run.followers[device] = worker
            self._calls.track_call(worker.actor.enter.remote(reform), partial(self.follower_ended, run, worker))
        run.joining, run.awaited = {}, set()

    def _cancel_resize(self, run: TrialRun, reason: str) -> None:
        """A new worker did not get there: the trial stays as it is."""
        self._unload_joining(run)
        run.wanted = tuple(device for device in run.devices if device in run.members())
        self._job.log.write("resize_failed", trial=run.id, devices=list(run.wanted), reason=reason[:REASON_LENGTH])
        self._emit(m.ResizeFailed(run.id, run.wanted))

    def end_growth(self, run: TrialRun, reason: str) -> None:
        """The trial must not have several workers again. It goes on with one, and a growth under way is called off."""
        if run.growth_ended:
            return
        run.growth_ended = True
        self._job.log.write("growth_ended", trial=run.id, reason=reason[:REASON_LENGTH])
        log.warning("trial %s goes on with one worker: %s", run.id, reason)
        if run.awaited:  # workers that already stand ready are refused by the leader at its next boundary
            self._cancel_resize(run, "the trial cannot have several workers")
        self._emit(m.GrowthEnded(run.id))

    def resize_refused(self, run: TrialRun, generation: float) -> None:
        """The leader did not take its new workers in. They end by themselves."""
        if generation != run.generation or not run.reforming:
            return
        run.reforming = False
        run.followers = {device: worker for device, worker in run.followers.items() if device in run.devices}
        self._cancel_resize(run, "the trial cannot have several workers")

    def _count_error(self, run: TrialRun, reason: str) -> None:
        """A follower's own code failed. The trial goes on, but the second time it does not grow again."""
        run.follower_errors += 1
        if run.follower_errors >= MAX_FOLLOWER_ERRORS:
            self.end_growth(run, f"its loop failed in {run.follower_errors} further workers, the last time by {reason}")

    def decline_devices(self, run: TrialRun) -> None:
        """The trial was started on several devices and turned out not to be elastic: give the others back."""
        self._cancel_resize(run, "its loop does not call fluidtune.elastic")
        run.devices = run.wanted

    def _unload_joining(self, run: TrialRun) -> None:
        """Call the resize off."""
        for worker in run.call_off_resize():
            self._dispatch.unload_trial(worker, CLEAN_BROKEN_S)

    def group_reformed(self, run: TrialRun, generation: float, seconds: float) -> None:
        """The leader says that it has formed the new group, with a pause of ``seconds``."""
        if generation != run.generation or not run.reforming:
            return
        run.reforming = False
        run.followers = {device: worker for device, worker in run.followers.items() if device in run.wanted}
        run.width, run.devices = len(run.wanted), run.wanted
        self._job.log.resized(run.id, run.wanted, seconds)
        self._emit(m.Resized(run.id, run.wanted, seconds))

    def follower_ended(self, run: TrialRun, worker: PooledWorker, value: Any) -> None:
        """A follower's loop is over: it was dismissed, its group broke, or its process died."""
        died = isinstance(value, RayActorError)
        is_member = run.leader is not None and run.followers.get(worker.device) is worker
        if died:
            self._dispatch.worker_died(worker, value)
        else:
            self._dispatch.unload_trial(worker, CLEAN_BROKEN_S)
        if is_member and isinstance(value, NotTakenIn):
            del run.followers[worker.device]
        elif is_member and worker.device in run.wanted:
            del run.followers[worker.device]
            broken = isinstance(value, Lack) and self._dispatch.device_broken(worker.device, value.reason)
            others_enter = run.followers.keys() - {*run.devices, worker.device}
            if run.mends and (died or value is None) and not others_enter:
                self._go_on_without(run, worker)
            elif died or broken:
                how = "died" if died else f"lost its device: {value.reason}"
                self._recovery.recover_trial(run, f"worker {worker.name} {how}", died=worker.device)
            else:
                if isinstance(value, Ungrowable):
                    self.end_growth(run, value.reason)
                elif value is not None:
                    self._count_error(run, str(value))
                self._recovery.recover_trial(run, f"worker {worker.name} left: {value}", alive=worker.device)
        elif is_member:
            # It was dismissed, and may serve another trial before the leader says so.
            del run.followers[worker.device]

    def _go_on_without(self, run: TrialRun, lost: PooledWorker) -> None:
        """The other workers go on by themselves; the engine decides anew how wide the trial shall be.

        A resize that is under way is called off: nobody enters a group together with a worker that died.
        """
        if lost.device not in run.devices:
            self._cancel_resize(run, f"worker {lost.name} was lost while it entered")
            return
        self._unload_joining(run)
        run.wanted = run.devices = tuple(device for device in run.devices if device in run.members())
        run.width = len(run.devices)
        # What it cost the others is part of their next iteration.
        self._job.log.resized(run.id, run.wanted, 0.0, lost=f"worker {lost.name} was lost")
        self._emit(m.WorkerLost(run.id, run.devices, lost.device))
