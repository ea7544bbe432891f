"""What a trial's life reads of Tune and of the job. It decides nothing and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.tune.experiment import Trial

from fluidtune.ray_compat.controller import TrackedActor
from fluidtune.ray_compat.trainable import TRAINING_ITERATION
from fluidtune.trials import TrialLife
from fluidtune.tune.trial_run import TrialRun, results_seen

if TYPE_CHECKING:
    from fluidtune.tune.tuning_job import TuningJob


@dataclass(frozen=True)
class KnownCheckpoint:
    """A checkpoint of which Tune knows; ``number``: ``training_iteration`` of its result."""

    number: Any


class TrialSurroundings:
    """The surroundings of one trial of the job; see `fluidtune.trials.messages.Outside`."""

    def __init__(self, job: TuningJob, trial: Trial) -> None:
        self._job, self._trial = job, trial
        #: Set right after it was made.
        self.run: TrialRun | None = None

    @property
    def can_save(self) -> bool:
        return self._job.trials.can_save(self._trial)

    @property
    def commits(self) -> bool:
        return self._job.setup.emulation is None

    @property
    def shares_gpus_by_count(self) -> bool:
        return self._job.setup.shares_gpus_by_count

    @property
    def waits_for_checkpoints(self) -> bool:
        return self._job.waits_for_checkpoints

    def newest_checkpoint(self) -> KnownCheckpoint | None:
        checkpoint = self._trial.latest_checkpoint_result
        return None if checkpoint is None else KnownCheckpoint(checkpoint.metrics.get(TRAINING_ITERATION))

    def out_of_reach(self) -> bool:
        assert self.run is not None
        return self._job.out_of_reach(self.run)


def new_run(job: TuningJob, tracked: TrackedActor, trial: Trial, kwargs: dict[str, Any]) -> TrialRun:
    """Tune wants the trial to run. ``kwargs``: of its trainable's constructor."""
    trials, outside = job.trials, TrialSurroundings(job, trial)
    gang = trials.share_of(trial) > 1
    life = TrialLife(trial.trial_id, outside, gang, trials.kind_of(trial), results_seen(trial))
    run = outside.run = TrialRun(tracked, trial, kwargs, trials.trainable_ref(trial), life)
    return run
