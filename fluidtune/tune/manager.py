"""The shell between Tune's controller, the engine and the workers.

It has the interface of Ray's own `RayActorManager`, so Tune's controller drives it as it drives that one: "add an
actor for this trial, run ``train`` on it, tell me the result". But an actor here is a place in a queue: the
engine decides when a trial starts, on which devices and how wide; a warm worker hosts it; a worker that dies
is replaced under the trial without Tune noticing. Nothing is decided here but the order in which messages
are carried.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ray.exceptions import RayActorError
from ray.tune.experiment import Trial

from fluidtune.cluster.lanes import Lack
from fluidtune.cluster.pool import PooledWorker
from fluidtune.cluster.worker import IterationReply, LoadSpec
from fluidtune.engine import messages as m
from fluidtune.ray_compat.controller import (
    ActorManager,
    TrackedActor,
    actor_manager,
    before_cleanup,
    replace_actor_manager,
    tell_failed,
    tell_started,
    tell_stopped,
)
from fluidtune.ray_compat.trainable import RESULT_DUPLICATE, TRAINING_ITERATION
from fluidtune.tune.crew import Crew, first_line
from fluidtune.tune.job import Job
from fluidtune.tune.resizer import Resizer
from fluidtune.tune.trial_run import Run, Task
from fluidtune.tune.workers import CLEAN_BROKEN_S


def install(controller: Any, scheduler: Any, trial: Trial) -> FluidActorManager | None:
    """Put FluidTune's executor under this controller, once; the first trial shows what the job needs.

    Returns None for a job whose trials Ray alone can place (several bundles): it runs as under stock Tune.
    Raises FluidTuneError for a later trial that asks for what the job's workers have not.
    """
    manager = actor_manager(controller)
    if isinstance(manager, FluidActorManager):
        manager._job.admit(trial)
        manager.note_trial(trial)
        return manager
    job = Job.for_controller(controller, scheduler, trial)
    if job is None:
        return None
    manager = FluidActorManager(job)
    replace_actor_manager(controller, manager)
    before_cleanup(controller, manager.wind_up)
    manager.note_trial(trial)
    return manager


def _call(callback: Callable[..., None] | None, *args: Any) -> None:
    """A callback into Tune, unless Tune has taken it back meanwhile."""
    if callback is not None:
        callback(*args)


class FluidActorManager(ActorManager):
    """Ray Tune's actor manager, with FluidTune's engine behind it. See `ActorManager` for what Tune calls."""

    def __init__(self, job: Job):
        super().__init__()
        self._job = job
        self._trials: dict[str, Trial] = {}
        #: Runs that Tune has asked for and not let go of, by ticket.
        self._runs: dict[TrackedActor, Run] = {}
        self._by_trial: dict[str, Run] = {}
        #: Runs that Tune let go of in this step; why is read from the trial when the step is over.
        self._released: list[Run] = []
        #: Tune's run is over; trials that it stops now have not ended.
        self._over = False
        #: Callbacks into Tune that are due, one a step.
        self._due: deque[Callable[[], None]] = deque()
        self._crew = Crew(job)
        self._resizer = Resizer(self._crew, self._spec, self._recover)
        for device, node in job.devices_there(wait_s=5.0):
            self._crew.events.append(m.DeviceGained(device, node))

    # --- what the scheduler tells

    def note_trial(self, trial: Trial) -> None:
        self._trials[trial.trial_id] = trial

    def budget_changed(self, trial_id: str, iterations: float | None, group: str) -> None:
        if trial_id in self._by_trial:
            self._job.goes_on(trial_id, group)
            self._crew.events.append(m.BudgetChanged(trial_id, iterations))

    def trial_removed(self, trial: Trial) -> None:
        """Tune stops a trial that waits or is paused."""
        if trial.trial_id not in self._by_trial:
            self._job.ended(trial, "stopped")

    def status_line(self) -> str:
        """One line for Tune's progress display."""
        return self._job.status_line(len(self._runs))

    # --- what Tune's controller asks for, see `ActorManager`

    def add_trial(self, ticket: TrackedActor, trial_id: str, kwargs: dict[str, Any]) -> None:
        trial = self._trials[trial_id]
        gang = self._job.share_of(trial) > 1
        run = Run(ticket, trial, kwargs, self._job.trainable_ref(trial), kind=self._job.kind_of(trial), gang=gang)
        self._runs[ticket] = run
        # The same trial may still be on its way out (paused and promoted in one step): say so first.
        self._tell_released()
        self._by_trial[trial_id] = run
        self._crew.events.extend(self._job.arrival(trial))

    def release_trial(self, ticket: TrackedActor) -> bool:
        run = self._runs.pop(ticket)
        was_live = self.unset_live(ticket)
        self._forget(run)
        self._released.append(run)
        if was_live:
            self._due.append(lambda: tell_stopped(ticket))
        return was_live

    def call_trainable(
        self,
        ticket: TrackedActor,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_result: Callable[..., None] | None,
        on_error: Callable[..., None] | None,
    ) -> Any:
        run = self._runs[ticket]
        task = Task(method, args, kwargs, on_result, on_error)
        run.tasks.append(task)
        self._issue(run)
        if task.future is None and run.tasks[0].method == method:
            return run.tasks[0].future  # asked for already, and nothing is done between
        return task.future

    def drop_calls(self, ticket: TrackedActor) -> None:
        run = self._runs.get(ticket)
        if run is not None:
            for task in run.tasks:
                self._crew.drop(task.future)
            run.tasks.clear()

    def resources_in_use(self) -> dict[str, float]:
        return self._job.resources_in_use()

    def count_pending(self) -> int:
        # Tune asks how many it may still ask for. Trials that it promotes must all be known, or their group would
        # be planned one by one; only new ones count, because each of these takes a suggestion from the searcher.
        return sum(1 for run in self._runs.values() if not run.delivered and not run.live)

    def count_unfinished(self) -> int:
        # Workers that clean up count, so that Tune gives them time to before it calls cleanup().
        return len(self._runs) + len(self._due) + self._crew.cleaning

    def count_calls(self) -> int:
        return sum(len(run.tasks) for run in self._runs.values())

    def answer_call(self, future: Any) -> None:
        """Wait for one task and tell Tune now (it does so for a trial's export, and then stops the trial)."""
        due = len(self._due)
        self._crew.resolve(future)
        if len(self._due) > due:
            self._due.pop()()

    def step(self, timeout: float | None) -> bool:
        """Carry out what is due, wait for at most one event, and call back into Tune for it."""
        self._advance()
        if not self._due:
            self._crew.wait(timeout)
            self._advance()
        if self._due:
            self._due.popleft()()
            return True
        return False

    def wind_up(self) -> None:
        """The run is over. What Tune stops from now on would have gone on, and may do so in a restored run."""
        self._tell_released()
        self._over = True
        self._job.wind_up(self._trials.values())

    def close(self) -> None:
        """The run is over: give every process and device back."""
        self._crew.close()
        self._job.close(self._trials.values())

    # --- carrying out

    def _advance(self) -> None:
        """Tell the engine what happened and do what it says, until there is nothing more to tell."""
        self._crew.poll()
        self._tell_released()
        while self._crew.events:
            events, self._crew.events = self._crew.events, []
            for instruction in self._job.decide(events):
                self._carry_out(instruction)
        self._crew.serve()
        starting = (run for run in self._runs.values() if run.placement is not None and not run.live)
        self._job.ask_ahead(sum(1 for run in starting if not run.delivered))
        self._job.settle(cleaning=self._crew.cleaning > 0)

    def _tell_released(self) -> None:
        for run in self._released:
            if run.trial.status == Trial.ERROR:
                ending: m.Ending = "failed"
            else:
                ending = "stopped" if run.trial.status == Trial.TERMINATED and not self._over else "paused"
            self._unload(run, self._job.workers.patience)
            self._job.ended(run.trial, ending)
            self._crew.events.append(m.TrialEnded(run.id, ending))
        self._released.clear()

    def _carry_out(self, instruction: m.Instruction) -> None:
        if isinstance(instruction, m.Start):
            run = self._by_trial[instruction.trial]
            if run.placement is not None:
                self._detach(run, "its device was lost")
            run.devices, run.share, run.width = instruction.devices, instruction.share, 1
            run.suspend = False
            run.wanted = instruction.devices
            self._place(run)
        elif isinstance(instruction, m.Resize):
            run = self._by_trial[instruction.trial]
            run.wanted = instruction.devices
            self._resizer.begin(run)
        elif isinstance(instruction, m.Suspend):
            self._by_trial[instruction.trial].suspend = True
        elif isinstance(instruction, m.Release):
            # Workers go back to the pool by themselves, but for a trial that lost one of its devices and must leave
            # the others: its one process may live there and see the lost one.
            left = self._by_trial.get(instruction.trial)
            waits = self._job.engine.trial(instruction.trial).status == "waiting"
            if waits and left is not None and left.placement is not None:
                self._detach(left, "one of its devices was lost")

    # --- a trial's leader

    def _place(self, run: Run) -> None:
        """Load the trial into a worker of its first device."""
        placement = run.placement = object()
        first = run.devices[0]

        def still() -> bool:
            return run.placement is placement  # else the trial ended while it waited for a worker

        def died() -> None:
            if still():
                self._recover(run, "the worker that it was to go on in died", died=first)

        def load(worker: PooledWorker) -> None:
            run.leader = worker
            future = worker.actor.load.remote(run.trainable_ref, self._spec(run))
            self._crew.track(future, partial(self._loaded, run, worker))

        # What an elastic trial was started on beyond its first device is taken in by a resize.
        self._crew.take(first, run.devices[1:] if run.gang else (), load, still, died)

    def _spec(self, run: Run) -> LoadSpec:
        kwargs = dict(run.kwargs, storage=run.trial.storage) if "storage" in run.kwargs else run.kwargs
        return LoadSpec(
            trial=run.id,
            kwargs=kwargs,
            delivered=run.delivered,
            backend=self._job.backend,
            device=self._job.torch_device,
            emulation=self._job.emulation,
            lanes=self._job.lane_settings(run.devices[0]),
            ticket=self._job.ticket(run),
        )

    def _loaded(self, run: Run, worker: PooledWorker, value: Any) -> None:
        if run.leader is not worker:
            return  # the trial ended while it was being loaded
        if isinstance(value, RayActorError):
            self._worker_died(run, worker, value)
        elif isinstance(value, Exception):
            self._fail(run, value)
        elif isinstance(value, Lack):
            self._lacks(run, value)
        elif run.started:
            self._recovered(run)
        else:
            run.live = run.started = True
            tracked = run.tracked
            self._job.align_logs(run)
            self.set_live(tracked, worker.actor)
            self._due.append(lambda: tell_started(tracked))

    def _recovered(self, run: Run) -> None:
        """The trial stands in a new worker where its last commit or checkpoint left it; go on with what was asked."""
        run.live = True
        assert run.leader is not None
        self.set_live(run.tracked, run.leader.actor)
        run.trial.set_ray_actor(run.leader.actor)
        self._job.log("recovered", trial=run.id, iteration=run.delivered, reason=run.loss)
        checkpoint = run.trial.latest_checkpoint_result
        if checkpoint and not (run.tasks and run.tasks[0].method == "restore"):
            run.tasks.appendleft(Task("restore", (checkpoint, True), {}, None, None))
        self._issue(run)

    def _issue(self, run: Run) -> None:
        """Send the trial's next task to its leader, one at a time and in order."""
        if not run.live or not run.tasks or run.tasks[0].issued or run.leader is None:
            return
        task = run.tasks[0]
        if run.suspend and task.method == "train":
            if run.at_own_checkpoint() or self._job.commits(run):
                self._move(run)
                return
            if self._job.saves(run):
                # It is asked for a checkpoint of this very iteration, as Tune would before a pause.
                task = Task("save", (), {}, None, None)
                run.tasks.appendleft(task)
        task.issued = True
        method = getattr(run.leader.actor, task.method)
        if task.method == "train":
            self._job.silence.asked(run.id, time.monotonic())
            # The leader keeps it until a boundary at which the new workers have announced themselves.
            reform, run.reform = run.reform, None
            run.reforming = run.reforming or reform is not None
            ticket = self._job.ticket(run)
            task.future = method.remote(reform, ticket) if reform or ticket else method.remote()
        else:
            task.future = method.remote(*task.args, **task.kwargs)
        self._crew.track(task.future, partial(self._answered, run, task))

    def _answered(self, run: Run, task: Task, value: Any) -> None:
        if task not in run.tasks:
            return
        if isinstance(value, RayActorError):
            self._worker_died(run, run.leader, value)
            return
        if isinstance(value, IterationReply) and value.lost:
            self._recover(run, f"its group broke: {value.lost}", alive=run.devices[0])
            return
        if isinstance(value, IterationReply) and value.lack is not None:
            self._lacks(run, value.lack)
            return
        if isinstance(value, Exception) and task.on_error is None:
            self._fail(run, value)  # a restore or save of our own: it cannot be got on from where Tune thinks it is
            return
        run.tasks.remove(task)
        if task.method == "save" and task.on_result is None:
            run.trial.on_checkpoint(value)
        if task.method == "restore" and isinstance(value, int):
            run.delivered = value  # another number after a restore of another trial's checkpoint
        self._issue(run)
        if isinstance(value, Exception):
            self._due.append(lambda: _call(task.on_error, run.tracked, value))
            return
        if isinstance(value, IterationReply):
            self._iteration_done(run, value)
            value = value.result
        self._due.append(lambda: _call(task.on_result, run.tracked, value))

    def _iteration_done(self, run: Run, outcome: IterationReply) -> None:
        run.deaths = run.misses = 0
        run.address, run.mends = outcome.address, outcome.mends
        if outcome.kind != run.kind:
            self._job.kind_found(run.trial, outcome.kind)
            for found in (run, *self._waiting_like(run)):
                found.kind = outcome.kind
                self._crew.events.append(m.KindFound(found.id, outcome.kind))
        if outcome.reformed is not None:
            self._resizer.done(run, *outcome.reformed)
        if RESULT_DUPLICATE not in outcome.result:
            run.delivered = int(outcome.result.get(TRAINING_ITERATION, run.delivered + 1))
            memory, ephemeral = outcome.memory, outcome.ephemeral
            self._crew.events.append(m.Result(run.id, outcome.seconds, run.ran_at, memory, ephemeral, outcome.busy))
            self._job.result(run, outcome)
        if run.kind == "elastic" and not run.gang and len(run.wanted) > run.width and not run.resizing:
            # It was started on several devices before its loop could say where the others find it.
            self._resizer.begin(run)

    def _waiting_like(self, run: Run) -> list[Run]:
        """Runs of the same trainable that nobody knows anything of yet."""
        name = run.trial.trainable_name
        return [
            other
            for other in self._runs.values()
            if other.placement is None and other.kind == "plain" and other.trial.trainable_name == name
        ]

    def _move(self, run: Run) -> None:
        """Take a trial off its device at its own checkpoint or commit; it goes on from there where the engine says."""
        run.suspend = run.live = False
        run.loss = "moved to another device"

        def moved() -> None:
            # An elastic trial commits while its worker cleans up: until then there is nothing to go on from.
            if run.tracked in self._runs and run.placement is None:
                self._crew.events.append(m.TrialEnded(run.id, "paused"))
                self._crew.events.extend(self._job.arrival(run.trial))

        self._unload(run, self._job.workers.patience, moved)

    # --- losses

    def _lacks(self, run: Run, lack: Lack) -> None:
        """Its device has no room for the trial: it goes on where there is, from where as little as possible is lost."""
        if lack.need is not None:
            persistent, ephemeral = lack.need
            self._crew.events.append(m.NeedFound(run.id, persistent + ephemeral, ephemeral))
        self._job.log("room_lacking", trial=run.id, device=run.devices[0], memory=lack.need, reason=lack.reason[:500])
        movable = run.live and (run.at_own_checkpoint() or self._job.commits(run) or self._job.saves(run))
        if lack.between and movable:
            run.suspend, run.tasks[0].issued = True, False
            self._issue(run)
        else:
            self._recover(run, lack.reason)

    def _worker_died(self, run: Run, worker: PooledWorker | None, error: Exception) -> None:
        if worker is not None:
            self._crew.lost(worker, error)
            run.leader = None if run.leader is worker else run.leader
        started = worker is None or worker.pid is not None
        device_there = worker is None or worker.device in self._job.reservation.nodes
        if run.died(started=started, device_there=device_there):
            self._fail(run, error)
        else:
            self._recover(run, f"its worker died: {first_line(error)}", died=None if worker is None else worker.device)

    def _recover(self, run: Run, reason: str, died: int | None = None, alive: int | None = None) -> None:
        """Take the trial off what is left of its workers; the engine gives it new devices.

        ``died``: the device of a worker that is dead, ``alive``: of one that lives, if that is known.
        """
        if run.tracked not in self._runs:
            return
        self._detach(run, reason)
        self._crew.poll(force=True)
        self._crew.events.append(m.WorkerLost(run.id, device=died, alive=alive))

    def _detach(self, run: Run, reason: str) -> None:
        """The trial has no workers any more; what Tune waits for will be asked again of the next ones."""
        run.live, run.loss = False, reason
        for task in run.tasks:
            self._crew.drop(task.future)
            task.issued, task.future = False, None
        # A restore that was issued and not answered is part of getting back, not of what Tune still waits for.
        while run.tasks and run.tasks[0].method == "restore" and run.tasks[0].on_result is None:
            run.tasks.popleft()
        self._unload(run, CLEAN_BROKEN_S)

    def _fail(self, run: Run, error: Exception) -> None:
        """The trial cannot be kept alive here: tell Tune, which follows the script's failure config."""
        tracked = run.tracked
        self.set_failed(tracked)
        tasks = list(run.tasks)
        self._runs.pop(tracked, None)
        self._forget(run)
        self._unload(run, CLEAN_BROKEN_S)
        self._crew.events.append(m.TrialEnded(run.id, "failed"))

        def tell() -> None:
            first = next((task for task in tasks if task.on_error is not None), None)
            if first is not None and not isinstance(error, RayActorError):
                # The trial's own error: Tune ends or requeues the trial for the task, and knows no ticket after that.
                _call(first.on_error, tracked, error)
                return
            tell_failed(tracked, error)
            for task in tasks:
                _call(task.on_error, tracked, error)

        self._due.append(tell)

    def _forget(self, run: Run) -> None:
        if self._by_trial.get(run.id) is run:
            del self._by_trial[run.id]
        for task in run.tasks:
            self._crew.drop(task.future)

    def _unload(self, run: Run, within: float, then: Callable[[], None] | None = None) -> None:
        """Let every worker of the trial clean up, leader first so that it can dismiss the others, and commit."""
        leader, run.leader = run.leader, None
        followers, run.followers = run.followers, {}
        joining, run.joining = run.joining, {}
        run.placement, run.address, run.awaited, run.reform, run.reforming = None, None, set(), None, False
        if leader is not None:
            self._crew.clean(leader, within, then)
        for worker in joining.values():
            self._crew.clean(worker, within)
        for worker in followers.values():
            # It cleans up when its loop has ended, see Resizer.
            self._job.workers.watch(worker, within)
