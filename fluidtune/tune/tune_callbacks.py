"""The callbacks into Tune that are due. The manager makes one a step, as Ray's own actor manager does.

Tune gives callbacks with a tracked actor and with each task. It may take those of the actor back meanwhile: they are
read when they are called. It may also give up an actor's tasks: those that are due are then not called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ray.exceptions import RayActorError
from ray.tune.experiment import Trial

from fluidtune.ray_compat import controller
from fluidtune.ray_compat.controller import TrackedActor
from fluidtune.tune.trial_run import Task


@dataclass(frozen=True)
class _Due:
    """A callback.

    ``answers``: the actor one of whose tasks it answers; None: it tells of something else. ``fails``: the actor that
    failed, if it tells of that.
    """

    call: Callable[[], None]
    answers: TrackedActor | None = None
    fails: TrackedActor | None = None


class TuneCallbacks:
    """The callbacks that are due, in order."""

    def __init__(self) -> None:
        self._due: deque[_Due] = deque()

    def __len__(self) -> int:
        return len(self._due)

    def call_next(self) -> None:
        """Make the oldest callback."""
        self._due.popleft().call()

    def call_newest(self) -> None:
        """Make the newest callback, ahead of the older ones."""
        self._due.pop().call()

    def drop_answers(self, tracked: TrackedActor) -> None:
        """Tune does not wait for the actor's tasks any more."""
        self._due = deque(due for due in self._due if due.answers is not tracked)

    def drop_failure(self, tracked: TrackedActor) -> None:
        """Tune has let go of the actor, and knows no trial of it any more."""
        self._due = deque(due for due in self._due if due.fails is not tracked)

    def tell(self, tracked: TrackedActor, what: Literal["started", "stopped"]) -> None:
        """The trial's actor runs, or is gone, as Tune asked for."""
        self._due.append(_Due(lambda: controller.tell(tracked, what)))

    def tell_result(
        self, tracked: TrackedActor, task: Task, value: Any, keep: Callable[[], None] | None = None
    ) -> None:
        """The task returned ``value``. ``keep`` is called right before Tune gets it."""

        def tell() -> None:
            if task.on_result is not None:
                _call(keep)
                task.on_result(tracked, value)

        self._due.append(_Due(tell, answers=tracked))

    def tell_error(self, tracked: TrackedActor, task: Task, error: Exception) -> None:
        """The task raised ``error``."""
        self._due.append(_Due(lambda: _call(task.on_error, tracked, error), answers=tracked))

    def tell_failed(self, tracked: TrackedActor, tasks: list[Task], error: Exception) -> None:
        """The trial's actor failed, and with it the ``tasks`` that Tune waits for."""

        def tell() -> None:
            first = next((task for task in tasks if task.on_error is not None), None)
            if first is not None and not isinstance(error, RayActorError):
                # The trial's own error: Tune ends or requeues the trial for the task, and then knows the actor no more.
                _call(first.on_error, tracked, error)
                return
            controller.tell(tracked, "failed", error)
            for task in tasks:
                _call(task.on_error, tracked, error)

        self._due.append(_Due(tell, fails=tracked))

    def tell_refused(self, tracked: TrackedActor, trial: Trial, error: Exception) -> None:
        """The trial fails without another attempt, which would fail, too. In a restored run it has its attempts."""

        def tell() -> None:
            attempts, trial.max_failures = trial.max_failures, 0
            try:
                controller.tell(tracked, "failed", error)
            finally:
                trial.max_failures = attempts  # Tune saves it

        self._due.append(_Due(tell, fails=tracked))


def _call(callback: Callable[..., None] | None, *args: Any) -> None:
    if callback is not None:
        callback(*args)
