"""What the driver keeps of one trial while Tune wants it to run: Tune's objects, and the trial's life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.tune.experiment import Trial

from fluidtune.elastic.transport.signing import new_secret
from fluidtune.ray_compat.controller import TrackedActor
from fluidtune.ray_compat.trainable import TRAINING_ITERATION
from fluidtune.trials import TrialLife
from fluidtune.trials.messages import Call
from fluidtune.trials.seen_results import SeenResults

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

    #: By which Tune knows the trial's actor.
    tracked: TrackedActor
    trial: Trial
    kwargs: dict[str, Any]
    trainable_ref: Any
    life: TrialLife
    #: By which its workers recognise each other.
    secret: bytes = field(default_factory=new_secret, repr=False)

    @property
    def id(self) -> str:
        return self.trial.trial_id

    def keep_progress(self, progress: dict[str, Any]) -> None:
        """Tune hears a result now: keep with the trial what it has seen.

        Tune saves it with the trial, so that the trial's next run knows it, also in a restored experiment.
        """
        setattr(self.trial.run_metadata, PROGRESS, {**progress, "failures": self.trial.num_failures})

    def iterations_to(self, target: float | None) -> float | None:
        """How many iterations the trial has left until its ``training_iteration`` is ``target``; None: not known."""
        checkpoint = self.trial.latest_checkpoint_result
        return self.life.seen.iterations_to(target, checkpoint.metrics.get(TRAINING_ITERATION) if checkpoint else 0)


def results_seen(trial: Trial) -> SeenResults:
    """What Tune has seen of the trial's results so far."""
    number = (trial.last_result or {}).get(TRAINING_ITERATION) or 0
    known = getattr(trial.run_metadata, PROGRESS, None)
    if known is None:  # it is new, or stock Tune or an older version began it
        delivered = int(number) if isinstance(number, (int, float)) else 0
        return SeenResults(delivered, delivered, number)
    retried = trial.num_failures > known["failures"]
    return SeenResults(known["delivered"], known["results"], number, known["own_numbers"], retried)
