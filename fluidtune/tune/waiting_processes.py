"""Processes of paused trials, which wait where they stand: a trial that Tune lets go on goes on there, exactly.

So a pause costs no commit, no start and no restore, whatever the script keeps in memory. A process waits on the node's
cores and holds memory, of which all waiting ones of a node together get a part. A trial that is to run elsewhere, with
another configuration or from another checkpoint is restored as ever, and so is one whose process has ended meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import cloudpickle

from fluidtune.cluster.hosting.messages import Footprint
from fluidtune.cluster.pool import PooledWorker, cleanup_patience
from fluidtune.ray_compat.trainable import TRIAL_INFO
from fluidtune.trials import messages as m
from fluidtune.tune.ray_calls import RayCalls
from fluidtune.tune.trial_run import TrialRun, place_of
from fluidtune.tune.worker_dispatch import WorkerDispatch

if TYPE_CHECKING:
    from fluidtune.tune.tuning_job import TuningJob


@dataclass(eq=False)
class _Waiting:
    """``config``: what the process was started with. ``checkpoint``: the trial's newest one when it was paused."""

    worker: PooledWorker
    park: m.Park
    config: bytes
    checkpoint: str | None
    secret: bytes
    #: The process and its memory, bytes; None: it has not said so.
    footprint: Footprint | None = None


class WaitingProcesses:
    """Belongs to one manager."""

    def __init__(self, job: TuningJob, calls: RayCalls, dispatch: WorkerDispatch) -> None:
        self._job, self._calls, self._dispatch = job, calls, dispatch
        #: By trial, the longest waiting one first.
        self._waiting: dict[str, _Waiting] = {}

    def can_wait(self, run: TrialRun) -> bool:
        """Whether the process of the trial may wait: what it holds is memory of the node alone, and the trial's state.

        A population may have given the trial another one's checkpoint, upon the very result after which it is paused.
        """
        setup = self._job.setup
        alone = setup.kind.cores and setup.lanes is None and not run.life.gang
        leader = run.life.crew.leader
        free = isinstance(leader, PooledWorker) and not leader.holds
        place = place_of(run.trial.latest_checkpoint_result)
        own = place is None or place.startswith(f"{run.trial.storage.trial_fs_path}/")
        return alone and free and own and self._job.settings.parked_memory > 0 and not self._job.reuses

    def wait(self, run: TrialRun, park: m.Park) -> None:
        """The trial is paused, and its leader waits."""
        worker = park.worker
        assert isinstance(worker, PooledWorker)
        worker.wait()
        checkpoint = place_of(run.trial.latest_checkpoint_result)
        waiting = self._waiting[run.id] = _Waiting(worker, park, _config_of(run), checkpoint, run.secret)
        self._calls.track_call(worker.actor.footprint.remote(), partial(self._said, run.id, waiting))

    def _said(self, trial: str, waiting: _Waiting, value: Any) -> None:
        if self._waiting.get(trial) is not waiting:
            return
        if not isinstance(value, Footprint):
            del self._waiting[trial]
            self._dispatch.worker_died(waiting.worker, value)
            return
        waiting.footprint = value
        self._make_room()

    def _make_room(self) -> None:
        """End those that wait longest where they have too much memory: first those that can be restored."""
        for node in {self._node(each) for each in self._waiting.values()}:
            here = {trial: each for trial, each in self._waiting.items() if self._node(each) == node and each.footprint}
            order = sorted(here, key=lambda trial: not (here[trial].park.commits or here[trial].checkpoint))
            held = sum(each.footprint.held for each in here.values() if each.footprint)
            for trial in order:
                footprint = here[trial].footprint
                assert footprint is not None
                if held <= self._job.settings.parked_memory * footprint.of_node:
                    break
                held -= footprint.held
                self.end(trial)

    def _node(self, waiting: _Waiting) -> str | None:
        return self._job.devices.nodes.get(waiting.worker.device)

    def claim(self, run: TrialRun, device: int, otherwise: Callable[[], None]) -> m.Resumed | None:
        """The trial's process, if it can go on on this device; it waits no more.

        None: it cannot. ``otherwise`` is called then: when a process of it that waits has ended, with its commit.
        """
        waiting = self._waiting.get(run.id)
        if waiting is None:
            otherwise()
            return None
        same = waiting.config == _config_of(run) and waiting.checkpoint == place_of(run.trial.latest_checkpoint_result)
        alive = self._job.pool.is_alive(waiting.worker)
        if same and alive and self._job.pool.go_on(waiting.worker, device, may_move=not self._job.setup.leased):
            del self._waiting[run.id]
            run.secret = waiting.secret
            return m.Resumed(waiting.worker, waiting.park.facts, waiting.park.done_here)
        self.end(run.id, otherwise)
        return None

    def end(self, trial: str, then: Callable[[], None] | None = None) -> None:
        """The trial is over, or is to go on elsewhere. ``then`` is called when its process, if one waits, has ended."""
        if (waiting := self._waiting.pop(trial, None)) is not None:
            self._dispatch.unload_trial(waiting.worker, cleanup_patience(), then)

    def leave(self, device: int) -> None:
        """The device is gone or is given back: what waits in its group ends in order."""
        for trial, waiting in list(self._waiting.items()):
            if device in (waiting.worker.device, waiting.worker.home):
                self.end(trial)

    def end_all(self) -> None:
        """The run is over: trials that commit do so, for a run that is restored."""
        for trial in list(self._waiting):
            self.end(trial)


def _config_of(run: TrialRun) -> bytes:
    """Tune copies the trial's configuration for each run, and puts into it what the trial is called."""
    try:
        return bytes(cloudpickle.dumps({**run.kwargs["config"], TRIAL_INFO: None}))
    except Exception:  # no later run has the same
        return repr(run).encode()
