"""FluidTune's actor manager: what Tune's controller talks to.

It has the interface of Ray's own `RayActorManager`, so Tune's controller drives it as it drives that one: "add an
actor for this trial, run ``train`` on it, tell me the result". But an actor here is a place in a queue: the engine
decides when a trial starts, on which devices and how wide; a worker hosts it; a worker that dies is replaced
under the trial without Tune noticing.

The manager decides nothing but the order in which messages are carried. A trial's life under it is decided in
`fluidtune.trials`, and `trial_shell` carries that out.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ray.tune.experiment import Trial

from fluidtune.cluster.devices.layout import refused
from fluidtune.engine import messages as m
from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat.checkpoint_deletion import keep_what_trials_go_on_from
from fluidtune.ray_compat.controller import ActorManager, TrackedActor, extend_controller, let_go, replace_actor_manager
from fluidtune.trials import messages as life
from fluidtune.trials.life_states import HELD
from fluidtune.tune.notice import AGAIN, Notice, seconds_for, why_not_again
from fluidtune.tune.ray_calls import IDLE_WAIT_S, RayCalls
from fluidtune.tune.search_memory import SearchMemory
from fluidtune.tune.trial_run import RunTable, Task, TrialRun, new_run, place_of, task_of
from fluidtune.tune.trial_shell import TrialShell
from fluidtune.tune.tune_callbacks import TuneCallbacks
from fluidtune.tune.tuning_job import TuningJob
from fluidtune.tune.waiting_processes import WaitingProcesses
from fluidtune.tune.worker_dispatch import WorkerDispatch

#: A job waits up to this many seconds for its first device before Tune goes on.
FIRST_DEVICE_WAIT_S = 5.0

#: The status line is made anew after this many seconds.
STATUS_S = 1.0

logger = logging.getLogger(__name__)


def install(controller: Any, scheduler: Any, trial: Trial, memory: SearchMemory) -> FluidActorManager | None:
    """Put FluidTune's executor under this controller. Its first trial shows what the job needs.

    Returns None for a job that runs as under stock Tune: see `TuningJob.for_controller`. ``memory``: of its algorithm.

    Raises:
        FluidTuneError: the first trial asks for devices that the job cannot have.
    """
    with ExitStack() as undone:
        job = TuningJob.for_controller(controller, scheduler, trial, undone)
        if job is None:
            return None
        manager = FluidActorManager(job)
        undone.pop_all()
    replace_actor_manager(controller, manager)
    keep_what_trials_go_on_from(controller)
    job.snapshots.keep_search(memory, job.folder.path if job.folder.is_local else None)

    def on_cleanup() -> None:
        scheduler.steered.close()
        # Tune has saved its final state by now, unless it cleans up because of an exception.
        saved = sys.exc_info()[0] is None
        manager.run_ended(saved)
        memory.run_ended(saved and job.snapshots.stored)

    def cleaned_up() -> None:
        manager.notice.close()
        if manager.notice.state == "over" and sys.exc_info()[0] is None:
            raise SystemExit(manager.status_of_notice())

    extend_controller(
        controller,
        on_cleanup,
        manager.status_line,
        lambda: memory.saved(controller),
        lambda: manager.notice.state == "over",
        cleaned_up,
    )
    manager.note_trial(trial)
    manager.notice.listen()
    return manager


@dataclass(frozen=True, eq=False)
class _Waiting:
    """Stands for the future of a call that waits for those before it."""

    run: TrialRun
    call: life.Call


class FluidActorManager(ActorManager):
    """Ray Tune's actor manager, with FluidTune's engine behind it. See `ActorManager` for what Tune calls."""

    def __init__(self, job: TuningJob):
        super().__init__()
        self.job = job
        #: That the driver is to end.
        self.notice = Notice(seconds_for(job.settings.notice_s), self.status_of_notice)
        #: Trials that Ray runs, because only Ray can place them. No event names them.
        self._left_to_ray: set[str] = set()
        #: Events for the next batch.
        self._events: list[m.Event] = []
        self._runs = RunTable()
        #: Runs that Tune let go of in this step, and whether each failed; why is read from the trial when the step is
        #: over.
        self._released: list[tuple[TrialRun, bool]] = []
        #: Trials without a run that Tune stopped in this step. The log has what came before first.
        self._removed: list[Trial] = []
        #: Tune's run is over; trials that it stops now have not ended.
        self._over = False
        #: The status line, and until when it counts as new (monotonic clock).
        self._status, self._status_until = "", 0.0
        self._calls = RayCalls()
        self._callbacks = TuneCallbacks()
        emit = self._events.append
        self._dispatch = WorkerDispatch(job, self._calls, emit)
        self._waiting = WaitingProcesses(job, self._calls, self._dispatch)
        self._dispatch.on_gone = self._waiting.leave
        self._shell = TrialShell(
            job, self, self._runs, self._calls, self._callbacks, self._dispatch, self._waiting, emit
        )
        self._events += job.begin(wait_s=FIRST_DEVICE_WAIT_S)

    # --- what the scheduler asks and tells

    def note_trial(self, trial: Trial) -> None:
        """Tune has made the trial, and may ask for its actor, which the job's workers or Ray will host."""
        self.job.trials.known[trial.trial_id] = trial
        if self.job.trials.is_left_to_ray(trial):
            self._left_to_ray.add(trial.trial_id)

    def budget_changed(self, trial_id: str, target: float | None, group: str) -> None:
        """The algorithm lets a trial that runs go on in ``group`` until iteration ``target``; None: not known."""
        run = self._runs.by_trial.get(trial_id)
        if run is not None:
            self.job.trials.promoted_in_place(self.job.engine.trial(trial_id).group, group)
            self._events.append(m.BudgetChanged(trial_id, run.life.iterations_to(target)))

    def trial_removed(self, trial: Trial) -> None:
        """Tune stops a trial that waits or is paused."""
        if trial.trial_id not in self._runs.by_trial and self.hosts(trial.trial_id):
            self._waiting.end(trial.trial_id)
            self._removed.append(trial)

    def status_line(self) -> str:
        """One line for Tune's progress display. Tune asks in every turn of its loop, but shows it seldom."""
        now = time.monotonic()
        if now >= self._status_until or not self._runs:
            job = self.job
            nodes, kind, silent = job.devices.nodes, job.setup.layout.kind, job.stall_detector.silent
            self._status = job.log.status_line(nodes, kind, self._runs.by_trial.keys(), silent)
            self._status_until = now + STATUS_S
        return self._status

    # --- what Tune's controller asks for, see `ActorManager`

    def hosts(self, trial_id: str) -> bool:
        return trial_id not in self._left_to_ray

    def add_trial(self, tracked: TrackedActor, trial_id: str, kwargs: dict[str, Any]) -> None:
        trials = self.job.trials
        trial = trials.known[trial_id]
        why = trials.refusal(trial)  # now, as a ResourceChangingScheduler changes what a paused trial asks for
        if why is not None:  # the trial fails; the job goes on
            self.set_failed(tracked)
            self.job.trial_refused(trial_id, why)
            self._callbacks.tell_refused(tracked, trial, refused(f"trial {trial_id}", why))
            return
        run = new_run(self.job, tracked, trial, kwargs)
        # The same trial may still be on its way out (paused and promoted in one step): say so first.
        self._tell_released()
        self._runs.add_run(run)
        self._events += trials.arrival_events(run)
        self.job.arriving.append(trials.share_of(trial))

    def release_trial(self, tracked: TrackedActor) -> bool:
        run = self._runs[tracked]
        was_live = self.unset_live(tracked)
        failed = run.trial.status == Trial.ERROR  # Tune may set it to PENDING at once, for a retry
        self._shell.tell(run, life.Released())
        self._runs.drop_run(run)
        self._released.append((run, failed))
        if was_live:
            self._callbacks.tell(tracked, "stopped")
        return was_live

    def call_trainable(
        self,
        tracked: TrackedActor,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_result: Callable[..., None] | None,
        on_error: Callable[..., None] | None,
    ) -> Any:
        run = self._runs[tracked]
        if method == "restore" and run.continued is not None and place_of(args[0]) == run.continued:
            args = (*args, True)  # no news: results that followed it are reported
        task = Task(args, kwargs, on_result, on_error)
        call = life.Call(method, on_result is not None, on_error is not None, carried=task)
        self._shell.tell(run, life.MethodCalled(call, plain=not args and not kwargs))
        calls = run.life.calls
        if task.future is not None or call not in calls:
            return task.future
        if calls[0] is not call and calls[0].method == method:
            return task_of(calls[0]).future  # asked for already, and nothing is done between
        return _Waiting(run, call)

    def drop_calls(self, tracked: TrackedActor) -> None:
        self._callbacks.drop_answers(tracked)
        run = self._runs.get(tracked)
        if run is not None:
            self._shell.tell(run, life.CallsDropped())

    def drop_failure(self, tracked: TrackedActor) -> None:
        self._callbacks.drop_failure(tracked)

    def resources_in_use(self) -> dict[str, float]:
        held = self.job.engine.held_count
        return {name: amount * held for name, amount in self.job.setup.layout.bundle.items()}

    def count_pending(self) -> int:
        # Tune asks how many it may still ask for. Trials that it promotes must all be known, or their group would
        # be planned one by one; only new ones count, because each of these takes a suggestion from the searcher.
        return self._runs.count_pending()

    def count_unfinished(self) -> int:
        # Workers that unload count, so that Tune gives them time to before it calls cleanup().
        return len(self._runs) + len(self._callbacks) + self._dispatch.unloading

    def count_calls(self) -> int:
        return sum(len(run.life.calls) for run in self._runs.begun())

    def answer_call(self, future: Any) -> None:
        """Wait for one task and tell Tune now (it does so for a trial's export, and then stops the trial)."""
        if isinstance(future, _Waiting):
            future = self._sent(future)
        due = len(self._callbacks)
        self._calls.resolve_call(future)
        if len(self._callbacks) > due:
            self._callbacks.call_newest()

    def _sent(self, waiting: _Waiting) -> Any:
        """Wait until the leader has answered the calls before this one and is sent it. Returns its future.

        Raises:
            FluidTuneError: the trial has no devices meanwhile. It may get some only when Tune goes on.
        """
        task, run = task_of(waiting.call), waiting.run
        while task.future is None:
            if not run.life.has_place:
                raise FluidTuneError(f"trial {run.id} has lost its devices, or has failed, before it was exported")
            self._calls.wait_for_one(IDLE_WAIT_S)
            self._advance()
        return task.future

    def step(self, timeout: float | None) -> bool:
        """Carry out what is due, wait for at most one event, and call back into Tune for it."""
        self._heed_notice()
        self._advance()
        if not self._callbacks:
            self._calls.wait_for_one(0.0 if self._dispatch.behind else timeout)
            self._advance()
        if self._callbacks:
            self._callbacks.call_next()
            return True
        return False

    def status_of_notice(self) -> int:
        """The driver's exit status after a notice: `AGAIN`, or 1 with a line if the job would get nowhere."""
        why = why_not_again(self.job.restored, self.job.reported)
        if why:
            logger.error("FluidTune: Slurm has begun this job again, and %s. It does not ask to be begun again", why)
        return 1 if why else AGAIN

    def _heed_notice(self) -> None:
        """Have trials saved, and later Tune's loop end, if the driver is to end."""
        begun = list(self._runs.begun())
        if self._over or not self.notice.advance(lambda: self._dispatch.unloading > 0 or any(map(_unsaved, begun))):
            return
        if self.notice.state == "leaving":
            self._waiting.end_all()
            self._dispatch.leave_all_devices()
            return
        stopped = [run.id for run in begun if run.life.has_place or run.life.place == "moving"]
        saved = [run.id for run in begun if run.id not in stopped]
        self.job.log.write("notice", seconds=self.notice.seconds, saved=saved, stopped=stopped)
        while self._callbacks:  # Tune's last snapshot has what is reported by now, and the pauses that follow from that
            self._callbacks.call_next()

    def run_ended(self, saved: bool) -> None:
        """The run is over. What Tune stops from now on would have gone on, and may do so in a restored run.

        ``saved``: Tune has saved its final state.
        """
        self._tell_released()
        self._waiting.end_all()
        for trial in self.job.trials.known.values():
            if trial.status == Trial.TERMINATED and self.hosts(trial.trial_id):
                self.job.trial_removed(trial)  # a stopper may have ended paused trials together with all others
        self._over = True
        self.job.snapshots.run_ended(saved)

    def close(self) -> None:
        """The run is over: give every process and device back."""
        self._calls.close()
        self.job.close()

    # --- carrying out

    def _advance(self) -> None:
        """Tell the engine what happened and do what it says, until there is nothing more to tell."""
        self._dispatch.poll_devices()
        self._tell_released()
        while self._events:
            events = list(self._events)
            self._events.clear()
            for instruction in self.job.decide(events):
                self._hand_on(instruction)
            # Trials that could not start may need a device that is only asked for now.
            self._dispatch.poll_devices()
        for trial in self._removed:
            self.job.trial_removed(trial)
        self._removed.clear()
        self._dispatch.serve_requests()
        lives = (run.life for run in self._runs.begun() if run.life.place in ("placed", "loading"))
        self.job.ask_ahead(sum(1 for starting in lives if not starting.seen.delivered))
        self._dispatch.kill_overdue_workers()
        self._shell.report_late(time.monotonic())
        self._shell.end_overdue(time.monotonic())
        self.job.do_periodic_work(unloading=self._dispatch.unloading > 0)

    def _tell_released(self) -> None:
        """Unload the trials that Tune let go of, and tell the engine."""
        for run, failed in self._released:
            if run.trial.status == Trial.ERROR:
                ending: m.Ending = "failed"
            else:
                ending = "stopped" if run.trial.status == Trial.TERMINATED and not self._over else "paused"
            if self._over and ending == "paused":
                self.job.log.leaves(run.id, "its driver ends")
            waits = not failed and not self._over and self._waiting.can_wait(run)
            self._shell.tell(run, life.Left(ending, keep=self.job.reuses and not failed, waits=waits))
            let_go(run.trial)
            self.job.departing += run.life.released_from in HELD
            self.job.trial_ended(run.trial, ending)
        self._released.clear()

    def _hand_on(self, instruction: Any) -> None:
        """What the engine says of a trial is an event of its life.

        From devices that it takes workers go back to the pool by themselves. Only a trial that lost one of its devices
        must be taken off the others: its one process may live there and see the lost device.
        """
        run, engine = self._runs.by_trial.get(instruction.trial), self.job.engine
        gone = isinstance(instruction, m.Release)
        if not gone or (run is not None and engine.trial(instruction.trial).status == "waiting"):
            self._shell.tell(self._runs.by_trial[instruction.trial], instruction)


def _unsaved(run: TrialRun) -> bool:
    """Whether the trial holds work that can be saved."""
    return run.life.kind != "plain" and run.life.place in ("live", "moving")
