"""How a trial leaves its workers: because Tune let go of it, because it moves, because a worker died, or because it
failed.

After a loss the engine gives the trial other devices and it goes on there (`trial_leaders`); Tune does not notice. Here
is decided only when there have been too many losses: then Tune is told that the trial failed.
"""

from __future__ import annotations

from collections.abc import Callable

from fluidtune.cluster.pool import PooledWorker
from fluidtune.engine import messages as m
from fluidtune.tune.manager_parts import ManagerParts
from fluidtune.tune.ray_calls import failure, first_line
from fluidtune.tune.trial_run import TrialRun
from fluidtune.tune.worker_dispatch import CLEAN_BROKEN_S


class TrialRecovery:
    """Belongs to one manager, whose ``parts`` it shares."""

    def __init__(self, parts: ManagerParts):
        self._job, self._actors, self._runs = parts.job, parts.actors, parts.runs
        self._calls, self._callbacks, self._dispatch = parts.calls, parts.callbacks, parts.dispatch
        self._emit = parts.emit

    def leader_died(self, run: TrialRun, worker: PooledWorker | None, error: Exception) -> None:
        """The process of the trial's leader is dead; None: the leader was taken off the trial meanwhile."""
        if worker is not None:
            self._dispatch.worker_died(worker, error)
            run.leader = None if run.leader is worker else run.leader
        started = worker is None or worker.pid is not None
        device_there = worker is None or worker.device in self._job.devices.nodes
        if run.count_death(started=started, device_there=device_there):
            self.fail_trial(run, error)
        else:
            died = None if worker is None else worker.device
            self.recover_trial(run, f"its worker died: {first_line(error)}", died=died)

    def recover_trial(self, run: TrialRun, reason: str, died: int | None = None, alive: int | None = None) -> None:
        """Take the trial off what is left of its workers, and have the engine give it new devices.

        ``died``: the device of a worker that is dead; ``alive``: the device of one that lives; None: not known.
        """
        if run not in self._runs:
            return
        self.detach_trial(run, reason)
        self._job.log.leaves(run.id, reason)
        self._dispatch.poll_devices(force=True)
        self._emit(m.WorkerLost(run.id, device=died, alive=alive))

    def detach_trial(self, run: TrialRun, reason: str) -> None:
        """Take the trial off its workers. What Tune waits for will be asked again of the next leader."""
        run.live, run.loss = False, reason
        for task in run.tasks:
            self._calls.drop_call(task.future)
            task.issued, task.future = False, None
        # A restore of our own that was not answered is part of getting back, not of what Tune waits for.
        while run.tasks and run.tasks[0].method == "restore" and run.tasks[0].on_result is None:
            run.tasks.popleft()
        self.unload_workers(run, CLEAN_BROKEN_S)

    def fail_trial(self, run: TrialRun, error: Exception) -> None:
        """The trial cannot be kept alive here: tell Tune, which follows the script's failure config."""
        self._actors.set_failed(run.tracked)
        tasks = list(run.tasks)
        self.forget_trial(run)
        self.unload_workers(run, CLEAN_BROKEN_S)
        self._job.log.leaves(run.id, f"it failed: {failure(error)}")
        self._emit(m.TrialEnded(run.id, "failed"))
        self._callbacks.tell_failed(run.tracked, tasks, error)

    def forget_trial(self, run: TrialRun) -> None:
        """Nobody waits for the trial's answers any more. Its workers stay as they are."""
        self._runs.drop_run(run)
        for task in run.tasks:
            self._calls.drop_call(task.future)

    def unload_workers(
        self,
        run: TrialRun,
        within: float,
        then: Callable[[], None] | None = None,
        keep: bool = False,
        fresh: str | None = None,
    ) -> None:
        """Take all workers off the trial; each is killed if it has not cleaned up within ``within`` seconds.

        The leader is unloaded first, so that it can commit and dismiss the others; ``then`` is called when it has.
        ``keep``: its trainable may stay for the next trial. ``fresh``: why its process does not. See `Worker.unload`.
        """
        leader, run.leader = run.leader, None
        followers, run.followers = run.followers, {}
        joining = run.call_off_resize()
        run.placement, run.address = None, None
        if leader is not None:
            self._dispatch.unload_trial(leader, within, then, keep, fresh)
        for worker in joining:
            self._dispatch.unload_trial(worker, within)
        for worker in followers.values():
            # It is unloaded when its loop has ended, see `Resizer`.
            self._dispatch.expect_cleanup(worker, within)
