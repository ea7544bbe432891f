"""Carries messages between the trials' lives and everything else: workers, the engine, Tune and the log.

What a trial's life wants (`fluidtune.trials.messages`) is carried out here, by `_METHODS`; what workers answer goes
back as events (`worker_answers`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ray.exceptions import RayActorError

from fluidtune.cluster import process_stack
from fluidtune.cluster.hosting.messages import IterationReply
from fluidtune.cluster.pool import PooledWorker, cleanup_patience
from fluidtune.cluster.sharing.lanes import Eviction
from fluidtune.engine import messages as engine
from fluidtune.error_lines import failure, first_line
from fluidtune.errors import FluidTuneError, TrialTimeoutError
from fluidtune.ray_compat.controller import ActorManager
from fluidtune.ray_compat.trainable import TrainingResult
from fluidtune.report.metric_values import value_of
from fluidtune.trials import handle
from fluidtune.trials import messages as m
from fluidtune.tune import result_logs, worker_answers
from fluidtune.tune.job_log import REASON_LENGTH
from fluidtune.tune.ray_calls import RayCalls
from fluidtune.tune.trial_run import RunTable, Task, TrialRun, keep_number, keep_progress, task_of
from fluidtune.tune.tune_callbacks import TuneCallbacks
from fluidtune.tune.tuning_job import TuningJob
from fluidtune.tune.waiting_processes import WaitingProcesses
from fluidtune.tune.worker_dispatch import UNLOAD_BROKEN_S, WorkerDispatch, WorkerRequest
from fluidtune.tune.worker_specs import attach_spec, lane_ticket, load_spec

log = logging.getLogger(__name__)

#: Seconds in which a new worker must be attached or refused; until then it holds a device and does nothing. Judgement:
#: on a busy node its process starts and imports torch in a minute.
LATE_S = 300.0


class TrialShell:
    """Belongs to one manager. ``actors``: the manager, as Tune sees it. ``emit`` hands an event to the engine."""

    def __init__(
        self,
        job: TuningJob,
        actors: ActorManager,
        runs: RunTable,
        calls: RayCalls,
        callbacks: TuneCallbacks,
        dispatch: WorkerDispatch,
        waiting: WaitingProcesses,
        emit: Callable[[engine.Event], None],
    ) -> None:
        self._job, self._actors, self._runs = job, actors, runs
        self._calls, self._callbacks, self._dispatch, self._emit = calls, callbacks, dispatch, emit
        self._waiting = waiting
        #: Trials that are about to be ended, as they have passed a limit.
        self._passed: set[str] = set()
        #: By name, new workers that have not said whether they are attached: since when (monotonic clock), and by which
        #: call.
        self._attaching: dict[str, tuple[TrialRun, PooledWorker, float, Any]] = {}
        #: By name, the call with which a worker follows, or will when it is attached.
        self._following: dict[str, Any] = {}

    def tell(self, run: TrialRun, event: m.Event | engine.Instruction) -> None:
        """Hand the event to the trial's life, and carry out what follows."""
        for instruction in handle(run.life, event):
            _METHODS[type(instruction)](self, run, instruction)

    def report_late(self, now: float) -> None:
        """Tell trials of new workers that are not attached in time. ``now``: monotonic clock."""
        for run, worker, since, _ in list(self._attaching.values()):
            if now - since > LATE_S:
                self.tell(run, m.NotAttached(worker, "late", f"a new worker was not attached in {LATE_S:.0f} s"))

    def end_overdue(self, now: float) -> None:
        """End the trials that have passed a limit of the user's. ``now``: monotonic clock."""
        times = self._job.stall_detector
        if not times.has_limits:
            return
        leaders = {run.id: run.life.crew.leader for run in self._runs.begun() if run.life.has_place}
        placed = [trial for trial, leader in leaders.items() if leader is not None and _pooled(leader).pid is not None]
        for trial, why in times.passed(now, placed).items():
            life = self._runs.by_trial[trial].life
            waits_for = life.calls[0] if life.place == "live" and life.calls and life.calls[0].issued else None
            by = life.crew.leader if life.place == "loading" else waits_for
            if trial in self._passed or by is None:
                continue
            self._passed.add(trial)
            self._ask_where(self._runs.by_trial[trial], by, why)

    def _ask_where(self, run: TrialRun, by: m.Call | m.Worker, why: str) -> None:
        assert run.life.crew.leader is not None
        worker = _pooled(run.life.crew.leader)
        node = self._job.pool.node_of(worker)

        def ended(stack: Any) -> None:
            self._passed.discard(run.id)
            if run.life.expects(by):
                self._job.stall_detector.forget(run.id)
                self._dispatch.kill_worker(worker, why)
                stood = f"; it stood here:\n{stack}" if isinstance(stack, str) and stack else ""
                self.tell(run, m.Raised(by, TrialTimeoutError(f"trial {run.id}: {why}{stood}")))

        if node is None or worker.pid is None:
            ended(None)
        else:
            self._calls.track_call(process_stack.asked_on(node, worker.pid), ended)

    # --- to the engine

    def _tell_engine(self, run: TrialRun, told: m.Tell) -> None:
        if told.why:
            self._job.log.leaves(run.id, told.why)
        self._emit(told.event)

    def _announce(self, run: TrialRun, announce: m.Announce) -> None:
        for event in self._job.trials.arrival_events(run):
            self._emit(event)

    def _share_capabilities(self, run: TrialRun, spread: m.ShareCapabilities) -> None:
        learned = m.CapabilitiesLearned(self._job.trials.learn(run.trial, spread.shown))
        for alike in self._runs.waiting_alike(run):
            self.tell(alike, learned)

    # --- to the leader

    def _request_leader(self, run: TrialRun, wanted: m.RequestLeader) -> None:
        self._runs.begin_run(run)
        others = wanted.others
        if self._job.trials.shown_by(run.trial).devices:
            # They are for processes of Ray Train's.
            for device in others:
                self._job.pool.discard_idle_workers(device)
            others = ()
        request = WorkerRequest(
            wanted.device,
            others,
            on_worker=lambda worker: self.tell(run, m.WorkerFound(worker)),
            still_wanted=lambda: run.life.wants_leader(wanted.placement),
            on_death=lambda: self._place_died(run, wanted.placement),
        )

        def anew() -> None:
            if request.still_wanted():
                self._dispatch.request_worker(request)

        resumed = self._waiting.claim(run, wanted.device, otherwise=anew)
        if resumed is not None:
            self.tell(run, resumed)

    def _place_died(self, run: TrialRun, placement: int) -> None:
        if run.life.wants_leader(placement):
            self.tell(run, m.MustReschedule(None, "the worker that it was to go on in died"))

    def _load(self, run: TrialRun, load: m.Load) -> None:
        worker = _pooled(load.worker)
        future = worker.actor.load.remote(run.trainable_ref, load_spec(self._job, run))
        self._calls.track_call(future, partial(self.leader_answered, run, worker, worker))

    def _call_leader(self, run: TrialRun, sent: m.CallLeader) -> None:
        call = sent.call
        if call.carried is None:  # the life has made the call
            restores = call.method == "restore"
            call.carried = Task((run.trial.latest_checkpoint_result, True) if restores else (), {})
        task = task_of(call)
        worker = _pooled(sent.worker)
        method = getattr(worker.actor, call.method)
        if call.method == "train":
            self._job.stall_detector.iteration_asked(run.id, time.monotonic())
            ticket, stored = lane_ticket(self._job, run), self._job.snapshots.pace.results_stored(run.id)
            task.future = method.remote(ticket, stored) if ticket or stored else method.remote()
        else:
            task.future = method.remote(*task.args, **task.kwargs)
        self._calls.track_call(task.future, partial(self.leader_answered, run, worker, call))

    def leader_answered(self, run: TrialRun, worker: PooledWorker, by: m.Call | PooledWorker, value: Any) -> None:
        """The leader answered ``by``, a call or the loading in it, or that raised ``value``."""
        if not run.life.expects(by):
            return  # the trial has left the worker meanwhile
        lack = value.lack if isinstance(value, IterationReply) else value
        if isinstance(value, Exception):
            event = self._failure(worker, by, value)
        elif isinstance(lack, Eviction) and lack.broken is not None:
            event = m.MustReschedule(by, lack.reason)
            if not self._dispatch.device_broken(run.life.crew.devices[lack.broken], lack.reason):
                why = f"{lack.reason}; the job has no other GPU for the trial: run it where there is one"
                event = m.Raised(by, FluidTuneError(why), final=True)
        else:
            event = worker_answers.called(by, value) if isinstance(by, m.Call) else worker_answers.loaded(by, value)
        self.tell(run, event)

    def _failure(self, worker: PooledWorker, by: m.Call | PooledWorker, error: Exception) -> m.Event:
        if self._heed_death(worker, error):
            there = worker.device in self._job.devices.nodes
            return m.LeaderDied(by, error, first_line(error), worker.pid is not None, there)
        plain_process = self._dispatch.stop_forking_if_asked(error)
        if plain_process is not None and worker.info is not None and worker.info.forked:  # else it only has its words
            return m.MustReschedule(by, plain_process)
        return m.Raised(by, error)

    def _heed_death(self, worker: PooledWorker, value: Any) -> bool:
        """Whether this answer says that the worker's process has died: then the pool and the devices know it."""
        if isinstance(value, RayActorError):
            self._dispatch.worker_died(worker, value)
        return isinstance(value, RayActorError)

    def _drop_calls(self, run: TrialRun, dropped: m.DropCalls) -> None:
        for call in dropped.calls:
            if call.carried is not None:
                self._calls.drop_call(task_of(call).future)
                task_of(call).future = None

    # --- to followers

    def _request_joiner(self, run: TrialRun, wanted: m.RequestJoiner) -> None:
        self._dispatch.request_worker(
            WorkerRequest(
                wanted.device,
                (),
                on_worker=lambda worker: self.tell(run, m.JoinerFound(worker)),
                still_wanted=lambda: run.life.wants_joiner(wanted.device, wanted.generation),
            )
        )

    def _attach(self, run: TrialRun, attach: m.Attach) -> None:
        worker = _pooled(attach.worker)
        attached = worker.actor.attach.remote(attach_spec(self._job, run))
        # It follows from its attachment on, and not only when the driver has heard of that.
        self._following[worker.name] = worker.actor.follow.remote()
        self._attaching[worker.name] = run, worker, time.monotonic(), attached
        self._calls.track_call(attached, partial(self._attached, run, worker))

    def _attached(self, run: TrialRun, worker: PooledWorker, value: Any) -> None:
        del self._attaching[worker.name]
        if value is None:
            self._calls.track_call(self._following[worker.name], partial(self._followed, run, worker))
        else:
            del self._following[worker.name]
            self._heed_death(worker, value)
        self.tell(run, worker_answers.attached(worker, value, worker.device in self._job.devices.nodes))

    def _followed(self, run: TrialRun, worker: PooledWorker, value: Any) -> None:
        del self._following[worker.name]
        self._heed_death(worker, value)
        if isinstance(value, Eviction):
            self._dispatch.device_broken(worker.device, value.reason)
        self.tell(run, worker_answers.followed(worker, value, worker.device in self._job.devices.nodes))

    def _drop_follower(self, worker: PooledWorker) -> None:
        """What the worker answers as a follower is of no interest any more."""
        if worker.name in self._attaching:
            self._calls.drop_call(self._attaching.pop(worker.name)[-1])
        if worker.name in self._following:
            self._calls.drop_call(self._following.pop(worker.name))

    def _discard(self, run: TrialRun, discard: m.Discard) -> None:
        worker = _pooled(discard.worker)
        self._drop_follower(worker)
        self._dispatch.kill_worker(worker, discard.why)

    # --- after a trial, and losses

    def _unload(self, run: TrialRun, unload: m.Unload) -> None:
        self._drop_follower(_pooled(unload.worker))
        then = (lambda: self.tell(run, m.Unloaded())) if unload.then else None
        within = cleanup_patience() if unload.patience == "long" else UNLOAD_BROKEN_S
        self._dispatch.unload_trial(_pooled(unload.worker), within, then, unload.keep)

    # --- to Tune

    def _tell_running(self, run: TrialRun, told: m.TellRunning) -> None:
        actor = _pooled(told.worker).actor
        self._actors.set_live(run.tracked, actor)
        if told.again is not None:
            run.trial.set_ray_actor(actor)
            self._job.log.write("recovered", trial=run.id, iteration=run.life.seen.delivered, reason=told.again)
            return
        if run.id not in self._job.started:
            self._job.started.add(run.id)
            result_logs.take_over(run.trial, run.life.seen.results)
        elif run.trial.checkpoint:
            result_logs.upload(run.trial)
        self._callbacks.tell(run.tracked, "started")

    def _tell_tune(self, run: TrialRun, told: m.TellTune) -> None:
        keep = None if told.progress is None else partial(keep_progress, run.trial, told.progress)
        if isinstance(told.value, TrainingResult) and told.value.checkpoint is not None:
            keep = partial(keep_number, run.trial, told.value)
        self._callbacks.tell_result(run.tracked, task_of(told.call), told.value, keep)

    def _tell_error(self, run: TrialRun, told: m.TellError) -> None:
        self._log_failure(run, told.error)
        self._callbacks.tell_error(run.tracked, task_of(told.call), told.error)

    def _fail(self, run: TrialRun, failed: m.Fail) -> None:
        self._actors.set_failed(run.tracked)
        self._runs.drop_run(run)
        self._log_failure(run, failed.error)
        self._callbacks.tell_failed(run.tracked, [task_of(call) for call in failed.calls], failed.error)

    def _keep_checkpoint(self, run: TrialRun, kept: m.KeepCheckpoint) -> None:
        keep_number(run.trial, kept.value)
        self._job.keep_checkpoint(run.trial, kept.value)
        self.tell(run, m.CheckpointKept())

    # --- to the log

    def _write(self, run: TrialRun, write: m.Write) -> None:
        reason = {} if write.reason is None else {"reason": write.reason[:REASON_LENGTH]}
        self._job.log.write(write.event, trial=run.id, **write.fields, **reason)

    def _log_failure(self, run: TrialRun, error: Exception) -> None:
        self._job.log.leaves(run.id, f"it failed: {failure(error)}")

    def _write_iteration(self, run: TrialRun, iteration: m.WriteIteration) -> None:
        job, reply = self._job, iteration.reply
        assert isinstance(reply, IterationReply)
        job.reported = True
        job.stall_detector.iteration_done(run.id, reply.seconds)
        if job.has_commits(run.trial):
            job.snapshots.pace.result_reported(run.id)
        metric, memory = job.scheduler.metric, job.setup.lanes is not None
        value = value_of(reply.result, metric) if metric else None
        job.log.iteration(run.id, run.life.seen.delivered, self._width(run), reply, value, memory)
        if reply.gpu is not None:
            job.gpu_telemetry.record_sample(run.life.crew.devices[0], reply.gpu, job.pool.workers.values())

    def _width(self, run: TrialRun) -> float:
        """The width of the iteration: workers, or the trial's share of one device beside those that are there."""
        crew, engine = run.life.crew, self._job.engine
        if crew.width > 1 or self._job.setup.lanes is None:
            return float(crew.width if crew.width > 1 else 1 / max(1, len(engine.tenants(crew.devices[0]))))
        return engine.trial(run.id).width


def _pooled(worker: m.Worker) -> PooledWorker:
    """The worker, which came from the pool."""
    assert isinstance(worker, PooledWorker)
    return worker


_METHODS: Mapping[type[m.Instruction], Callable[[TrialShell, TrialRun, Any], None]] = {
    m.Tell: TrialShell._tell_engine,
    m.Announce: TrialShell._announce,
    m.ShareCapabilities: TrialShell._share_capabilities,
    m.RequestLeader: TrialShell._request_leader,
    m.Load: TrialShell._load,
    m.CallLeader: TrialShell._call_leader,
    m.DropCalls: TrialShell._drop_calls,
    m.RequestJoiner: TrialShell._request_joiner,
    m.Attach: TrialShell._attach,
    m.Discard: TrialShell._discard,
    m.Unload: TrialShell._unload,
    m.Park: lambda shell, run, park: shell._waiting.wait(run, park),
    m.EndIdleWorkers: lambda shell, run, end: shell._job.pool.discard_all_idle_workers(),
    m.PollDevices: lambda shell, run, poll: shell._dispatch.poll_devices(force=True),
    m.TellRunning: TrialShell._tell_running,
    m.TellTune: TrialShell._tell_tune,
    m.TellError: TrialShell._tell_error,
    m.Fail: TrialShell._fail,
    m.KeepCheckpoint: TrialShell._keep_checkpoint,
    m.Write: TrialShell._write,
    m.WriteIteration: TrialShell._write_iteration,
    m.Warn: lambda shell, run, warning: log.warning("%s", warning.text),
}
