"""What the driver keeps of each trial that Tune wants to run: Tune's objects, and the trial's life.

`new_run` makes the record of a trial, and `RunTable` finds it by Tune's tracked actor or by the trial's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ray.tune.experiment import Trial

from fluidtune.elastic.divided.meeting import new_secret
from fluidtune.ray_compat.controller import TrackedActor
from fluidtune.ray_compat.trainable import TRAINING_ITERATION, count_checkpoint
from fluidtune.trials.life import SeenResults, TrialStateMachine
from fluidtune.trials.messages import Call, Checkpoint, Outside

if TYPE_CHECKING:
    from fluidtune.tune.tuning_job import TuningJob

#: Under this name a trial's run metadata have what of its results Tune has seen. Tune saves all that is in there.
PROGRESS = "fluidtune_progress"


@dataclass(eq=False)
class Task:
    """A call that is carried to a leader, and whom to tell of its end; both None for a call that the life has made."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    on_result: Callable[..., None] | None = None
    on_error: Callable[..., None] | None = None
    future: Any = None


def task_of(call: Call) -> Task:
    """What the driver keeps with the call."""
    task: Task = call.carried
    return task


@dataclass(eq=False)
class TrialRun:
    """A trial from the moment Tune asks for its actor until Tune lets go of it, or it fails."""

    id: str
    #: By which Tune knows the trial's actor.
    tracked: TrackedActor
    trial: Trial
    #: Of its trainable's constructor.
    kwargs: dict[str, Any]
    trainable_ref: Any
    life: TrialStateMachine
    #: Where the checkpoint is from which the driver before had the trial go on, and then heard results of it; None:
    #: there is none, or this driver has started the trial before.
    continued: str | None = None
    #: By which its workers recognise each other.
    secret: bytes = field(default_factory=new_secret, repr=False)


def new_run(job: TuningJob, tracked: TrackedActor, trial: Trial, kwargs: dict[str, Any]) -> TrialRun:
    """Tune wants the trial to run."""
    trials, name = job.trials, trial.trial_id
    outside = Outside(
        can_save=trials.can_save(trial),
        commits=job.setup.emulation is None,
        shares_gpus_by_count=job.setup.shares_gpus_by_count,
        waits_for_checkpoints=job.scheduler.adapter.waits_for_checkpoints,
        newest_checkpoint=partial(newest_checkpoint, trial),
        on_several_nodes=job.on_several_nodes,
        needs_several=lambda: trials.share_of(trial) > 1,
    )
    shown = trials.shown_by(trial)
    life = TrialStateMachine(name, outside, shown.kind or "plain", results_seen(trial), shown.growable)
    continued = None if name in job.started else getattr(trial.run_metadata, PROGRESS, {}).get("checkpoint")
    return TrialRun(name, tracked, trial, kwargs, trials.trainable_ref(trial), life, continued)


def place_of(saved: Any) -> str | None:
    """The path of the checkpoint in what Tune keeps of one; None: there is none."""
    return getattr(getattr(saved, "checkpoint", None), "path", None)


def newest_checkpoint(trial: Trial) -> Checkpoint | None:
    checkpoint = trial.latest_checkpoint_result
    return None if checkpoint is None else Checkpoint(checkpoint.metrics.get(TRAINING_ITERATION))


def results_seen(trial: Trial) -> SeenResults:
    """What Tune has seen of the trial's results so far."""
    number = (trial.last_result or {}).get(TRAINING_ITERATION) or 0
    known = getattr(trial.run_metadata, PROGRESS, None)
    if known is None:  # it is new, or stock Tune or an older version began it
        delivered = int(number) if isinstance(number, (int, float)) else 0
        return SeenResults(delivered, delivered, number)
    retried = trial.num_failures > known["failures"]
    return SeenResults(known["delivered"], known["results"], number, known["own_numbers"], retried)


def keep_progress(trial: Trial, progress: Mapping[str, Any]) -> None:
    """Tune gets a result now: keep with the trial what it has seen, for `results_seen`, also after a restore.

    A checkpoint that the trial has from another one (PBT, a clone) is kept, too: a later driver restores it once more.
    """
    more = {"failures": trial.num_failures, "checkpoint": place_of(trial.latest_checkpoint_result)}
    setattr(trial.run_metadata, PROGRESS, {**progress, **more})


def keep_number(trial: Trial, saved: Any) -> None:
    """Tune registers the checkpoint ``saved`` now, and counts one more: have it come to the checkpoint's own number.

    A process in which iterations run again writes their checkpoints again, which Tune never gets, and so is ahead of
    Tune. A later process goes on from Tune's count. It would write over this checkpoint, and a trial that is restored
    from it would find a later one there.
    """
    count_checkpoint(trial.storage, saved, counted=False)


class RunTable(dict[TrackedActor, TrialRun]):
    """Every `TrialRun` from the moment Tune asks for its actor until Tune lets go of it, or it fails."""

    def __init__(self) -> None:
        super().__init__()
        #: Trial id -> its newest run.
        self.by_trial: dict[str, TrialRun] = {}
        #: Runs that have had a place at least once: not many more than there are devices.
        self._begun: dict[TrackedActor, TrialRun] = {}
        #: Number of the other runs of which Tune has seen no iteration.
        self._untried = 0

    def add_run(self, run: TrialRun) -> None:
        """Tune asks for the trial's actor."""
        self[run.tracked] = self.by_trial[run.id] = run
        self._untried += not run.life.seen.delivered

    def begin_run(self, run: TrialRun) -> None:
        """The engine has given the trial devices."""
        if run.tracked not in self._begun:
            self._begun[run.tracked] = run
            self._untried -= not run.life.seen.delivered

    def drop_run(self, run: TrialRun) -> None:
        """Tune let go of the trial, or it failed."""
        dropped = self.pop(run.tracked, None)
        if self._begun.pop(run.tracked, None) is None and dropped is not None:
            self._untried -= not run.life.seen.delivered
        if self.by_trial.get(run.id) is run:
            del self.by_trial[run.id]

    def begun(self) -> Collection[TrialRun]:
        """Runs that have had a place at least once, in that order. Only these may be asked for anything."""
        return self._begun.values()

    def count_pending(self) -> int:
        """Runs of which Tune has seen no iteration and that are not live."""
        lives = (run.life for run in self._begun.values())
        return self._untried + sum(1 for life in lives if not life.seen.delivered and life.place != "live")

    def waiting_alike(self, run: TrialRun) -> list[TrialRun]:
        """Runs of the same trainable that wait for devices."""
        name = run.trial.trainable_name
        return [other for other in self.values() if not other.life.has_place and other.trial.trainable_name == name]
