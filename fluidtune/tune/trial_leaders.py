"""The leader of every trial: the worker that hosts the trial and answers Tune.

A leader is loaded with its trial, gets Tune's tasks one by one, and its answers go to Tune, to the engine and to the
log. A trial that is to move leaves its leader at a point from which it can go on. `trial_recovery` handles the loss of
workers, and `resizer` the further workers of a trial.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

from ray.exceptions import RayActorError

from fluidtune.cluster.forks.shelf import NeedsPlainProcess
from fluidtune.cluster.lanes import Lack
from fluidtune.cluster.messages import IterationReply
from fluidtune.cluster.pool import PooledWorker, cleanup_patience
from fluidtune.engine import messages as m
from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat.trainable import RESULT_DUPLICATE, TRAINING_ITERATION
from fluidtune.tune.job_log import REASON_LENGTH
from fluidtune.tune.manager_parts import ManagerParts
from fluidtune.tune.ray_calls import failure
from fluidtune.tune.resizer import Resizer
from fluidtune.tune.trial_recovery import TrialRecovery
from fluidtune.tune.trial_run import Task, TrialRun
from fluidtune.tune.worker_dispatch import WorkerRequest

log = logging.getLogger(__name__)


class TrialLeaders:
    """Belongs to one manager, whose ``parts`` it shares."""

    def __init__(self, parts: ManagerParts, recovery: TrialRecovery, resizer: Resizer):
        self._job, self._actors, self._runs = parts.job, parts.actors, parts.runs
        self._calls, self._callbacks, self._dispatch = parts.calls, parts.callbacks, parts.dispatch
        self._emit = parts.emit
        self._recovery = recovery
        self._resizer = resizer

    # --- a new leader

    def place_trial(self, run: TrialRun) -> None:
        """Load the trial into a worker of its first device, as soon as there is one."""
        self._runs.begin_run(run)
        placement = run.placement = object()
        first = run.devices[0]

        def still_wanted() -> bool:
            return run.placement is placement  # else the trial ended while it waited for a worker

        def on_death() -> None:
            if still_wanted():
                self._recovery.recover_trial(run, "the worker that it was to go on in died", died=first)

        def on_worker(worker: PooledWorker) -> None:
            run.leader, run.iterated = worker, False
            future = worker.actor.load.remote(run.trainable_ref, self._job.load_spec(run))
            self._calls.track_call(future, partial(self.leader_loaded, run, worker))

        # An elastic trial gets the workers of its other devices by a resize.
        others = run.devices[1:] if run.gang else ()
        self._dispatch.request_worker(WorkerRequest(first, others, on_worker, still_wanted, on_death))

    def leader_loaded(self, run: TrialRun, worker: PooledWorker, value: Any) -> None:
        """The worker answered `load`. ``value`` None: the trial is loaded in it."""
        if run.leader is not worker:
            return  # the trial ended while it was being loaded
        if isinstance(value, RayActorError):
            self._recovery.leader_died(run, worker, value)
        elif self._needs_plain_process(run, value):
            pass
        elif isinstance(value, Exception):
            self._recovery.fail_trial(run, value)
        elif isinstance(value, Lack):
            self._room_lacking(run, value)
        elif run.started:
            self._trial_recovered(run)
        else:
            run.live = run.started = True
            self._job.align_logs(run)
            self._actors.set_live(run.tracked, worker.actor)
            self._callbacks.tell_started(run.tracked)

    def _trial_recovered(self, run: TrialRun) -> None:
        """The trial is loaded in a new worker, at its last commit or checkpoint: go on with Tune's tasks."""
        assert run.leader is not None
        run.live = True
        self._actors.set_live(run.tracked, run.leader.actor)
        run.trial.set_ray_actor(run.leader.actor)
        self._job.log.write("recovered", trial=run.id, iteration=run.delivered, reason=run.loss)
        checkpoint = run.trial.latest_checkpoint_result
        if checkpoint and not (run.tasks and run.tasks[0].method == "restore"):
            run.tasks.appendleft(Task("restore", (checkpoint, True), {}, None, None))
        self.issue_next_task(run)

    # --- tasks and answers

    def issue_next_task(self, run: TrialRun) -> None:
        """Send the trial's oldest task to its leader, unless one is under way."""
        if not run.live or not run.tasks or run.tasks[0].issued or run.leader is None:
            return
        task = run.tasks[0]
        if run.suspend and task.method == "train":
            if run.movable or self._job.commits_when_unloaded(run):
                self._move_trial(run)
                return
            if self._job.trials.can_save(run.trial):
                # The trial is asked for a checkpoint of its newest iteration, as Tune would before a pause.
                task = Task("save", (), {}, None, None)
                run.tasks.appendleft(task)
        task.issued, run.saved = True, None
        method = getattr(run.leader.actor, task.method)
        if task.method == "train":
            self._job.stall_detector.iteration_asked(run.id, time.monotonic())
            # The leader keeps ``reform`` until a boundary at which the new workers have announced themselves.
            reform, run.reform = run.reform, None
            run.reforming = run.reforming or reform is not None
            ticket = self._job.lane_ticket(run)
            task.future = method.remote(reform, ticket) if reform or ticket else method.remote()
        else:
            task.future = method.remote(*task.args, **task.kwargs)
        self._calls.track_call(task.future, partial(self._task_answered, run, task))

    def answer_save(self, run: TrialRun, task: Task) -> bool:
        """Answer Tune's ``save`` by what came with the newest result, without a call to the worker. Returns whether.

        Tune gets no future then.
        """
        if run.saved is None or run.tasks or task.method != "save" or task.args or task.kwargs:
            return False
        saved, run.saved = run.saved, None
        self._callbacks.tell_result(run.tracked, task, saved)
        return True

    def _task_answered(self, run: TrialRun, task: Task, value: Any) -> None:
        """The leader answered a task, or the call raised ``value``."""
        if task not in run.tasks:
            return
        if isinstance(value, RayActorError):
            self._recovery.leader_died(run, run.leader, value)
            return
        if self._needs_plain_process(run, value):
            return
        if isinstance(value, IterationReply) and value.lost:
            if value.ungrowable is not None:
                self._resizer.end_growth(run, value.ungrowable)
            self._recovery.recover_trial(run, f"its group broke: {value.lost}", alive=run.devices[0])
            return
        if isinstance(value, IterationReply) and value.lack is not None:
            self._room_lacking(run, value.lack)
            return
        if isinstance(value, Exception) and task.on_error is None:
            # A restore or save of our own failed: the trial cannot go on from where Tune thinks it is.
            self._recovery.fail_trial(run, value)
            return
        run.tasks.remove(task)
        if task.method == "save" and task.on_result is None:
            run.trial.on_checkpoint(value)
        if task.method == "restore" and isinstance(value, int):
            # They change when another trial's checkpoint was restored, and in a retry.
            run.delivered, run.number = value, task.args[0].metrics.get(TRAINING_ITERATION, value)
        self.issue_next_task(run)
        if isinstance(value, Exception):
            self._job.log.leaves(run.id, f"it failed: {failure(value)}")
            self._callbacks.tell_error(run.tracked, task, value)
            return
        keep = None
        if isinstance(value, IterationReply):
            if RESULT_DUPLICATE not in value.result:
                number = value.result.get(TRAINING_ITERATION, value.iteration)
                keep = partial(run.keep_progress, run.note_result(value.iteration, number))
            self._iteration_done(run, value)
            if not run.tasks and not self._job.waits_for_checkpoints:
                run.saved = value.saved
            value = value.result
        self._callbacks.tell_result(run.tracked, task, value, keep)

    def _needs_plain_process(self, run: TrialRun, value: Any) -> bool:
        """Whether the trial must go on in a process that is not forked, and now does so: its code has changed what an
        import reads, after that was imported for it.
        """
        why = NeedsPlainProcess.said_by(value) if isinstance(value, Exception) else None
        if why is None or not self._job.pool.stop_forking(why):
            return False
        self._recovery.recover_trial(run, why, alive=run.devices[0])
        return True

    def _iteration_done(self, run: TrialRun, reply: IterationReply) -> None:
        """Tell the engine and the log what an iteration showed.

        The engine's estimates of speed come from `messages.Result` alone. The log and the stall detector get the same
        seconds at once, while the engine gets its events in batches: in the log an iteration stands before what
        follows from it.
        """
        run.deaths = run.misses = 0
        run.iterated = True
        run.address, run.mends = reply.address, reply.mends
        run.streams = reply.streams or run.streams
        if reply.kind != run.kind:
            self._kind_found(run, reply.kind)
        if reply.reformed is not None:
            self._resizer.group_reformed(run, *reply.reformed)
        if reply.differed is not None:
            log.warning("trial %s: %s", run.id, reply.differed)
            self._job.log.write("workers_differed", trial=run.id, reason=reply.differed[:REASON_LENGTH])
        if reply.ungrowable is not None:
            self._resizer.end_growth(run, reply.ungrowable)
        if reply.refused is not None:
            self._resizer.resize_refused(run, reply.refused)
        if RESULT_DUPLICATE not in reply.result:
            memory, ephemeral = reply.memory, reply.ephemeral
            self._emit(m.Result(run.id, reply.seconds, run.ran_at, memory, ephemeral, reply.compute))
            self._job.iteration_reported(run, reply)
        if not run.gang and len(run.wanted) > run.width and not run.resizing:
            # The trial was started on several devices, and only now has its loop said where followers find the leader,
            # or that it is not elastic.
            if run.kind == "elastic":
                self._resizer.begin_resize(run)
            else:
                self._resizer.decline_devices(run)

    def _kind_found(self, run: TrialRun, kind: m.Kind) -> None:
        """The trial has shown its kind: waiting runs of the same trainable are taken to be of this kind, too."""
        self._job.trials.kind_found(run.trial, kind)
        self._job.log.write("kind_found", trial=run.id, kind=kind)
        for alike in (run, *self._runs.unknown_alike(run)):
            alike.kind = kind
            self._emit(m.KindFound(alike.id, kind))

    # --- a trial that has to go elsewhere

    def _move_trial(self, run: TrialRun) -> None:
        """Take the trial off its device at its own checkpoint or commit; the engine says where it goes on."""
        run.suspend = run.live = False
        run.loss = "moved to another device" + (f": {run.suspended_for}" if run.suspended_for else "")
        run.suspended_for = ""
        self._job.log.leaves(run.id, run.loss)

        def on_unloaded() -> None:
            # An elastic trial commits while its worker cleans up: until then there is nothing to go on from.
            if run in self._runs and run.placement is None:
                self._emit(m.TrialEnded(run.id, "paused"))
                for event in self._job.trials.arrival_events(run, self._job.log):
                    self._emit(event)

        self._recovery.unload_workers(run, cleanup_patience(), on_unloaded)

    def _room_lacking(self, run: TrialRun, lack: Lack) -> None:
        """The device has no room for the trial: it goes on elsewhere, from where it loses as little as possible."""
        if lack.broken is not None:
            self._device_broken(run, lack.reason, run.devices[lack.broken])
            return
        if lack.need is not None:
            persistent, ephemeral = lack.need
            self._emit(m.NeedFound(run.id, persistent + ephemeral, ephemeral))
        if self._job.setup.shares_gpus_by_count:
            # It gets another try on a GPU without neighbours, of which idle workers hold contexts, too.
            run.squeezed = True
            self._job.pool.discard_all_idle_workers()
        reason = lack.reason[:REASON_LENGTH]
        self._job.log.write("room_lacking", trial=run.id, device=run.devices[0], memory=lack.need, reason=reason)
        can_save = self._job.trials.can_save
        movable = run.live and (run.movable or self._job.commits_when_unloaded(run) or can_save(run.trial))
        if lack.between and movable:
            run.suspend, run.suspended_for, run.tasks[0].issued = True, lack.reason, False
            self.issue_next_task(run)
        else:
            self._recovery.recover_trial(run, lack.reason)

    def _device_broken(self, run: TrialRun, why: str, device: int) -> None:
        """A device's hardware has failed under the trial, which goes on elsewhere from its last commit."""
        if self._dispatch.device_broken(device, why):
            self._recovery.recover_trial(run, why, died=device)
        else:
            self._recovery.fail_trial(
                run, FluidTuneError(f"{why}; the job has no other GPU for the trial: run it where there is one")
            )
