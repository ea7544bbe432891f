"""The one list of everything that FluidTune uses of Ray beyond its public API.

Each entry says what is used and why; tests/tune/test_compat.py fails when a Ray release changes it.
Nothing else in the project may import a Ray module with an underscore in its path.

- ``TuneController.cleanup``: it stops trials that could go on in a later run; we must know that it has begun.
- ``TuneController._actor_manager``: replaced by ours on the first trial. Ray took its pluggable executor
  away in 2.7; this attribute, with `RayActorManager`'s methods, is where it stood.
- ``TrialRunnerWrapper._tune_controller``: schedulers are handed the wrapper, not the controller.
- ``TuneController._set_trial_status``: a whole rung that HyperBand lets go on is made pending at once.
- ``TuneController._max_pending_trials``: raised (by a public method) while new processes are being started, and
  while trials of ``_pending_trials`` go on.
- ``TuneController._reuse_actors``: switched off, because the pool of warm workers does the same better.
- ``class_cache.ENV_VARS_TO_PROPAGATE``: the environment of the driver that a trial's processes get.
- ``TrackedActor``: the ticket that the controller keeps for a trial's actor.
- The train session of a function trainable: a follower's is muted, so that only the leader reports; an elastic
  leader's loop is let go on from its report when the trial ends (``continue_lock``, ``training_thread``,
  ``result_queue``, ``error_queue``).
- ``HyperBandScheduler._hyperbands``, ``_max_t_attr`` and ``_Bracket``'s fields: what rung a trial is in, how long it
  is and what follows it.
- ``AsyncHyperBandScheduler._max_t``, and ``_time_attr`` of every scheduler that has one: how long a trial may train.
- ``PopulationBasedTraining._synch``, ``_next_perturbation_sync``, ``_perturbation_interval``: its intervals.
- ``MaximumIterationStopper._max_iter``, ``CombinedStopper._stoppers``, ``TuneController._stopper``: likewise.
- ``Tuner._local_tuner``: where a restored Tuner keeps its `TuneConfig`.
- ``Trainable._iteration``, ``_time_total``: continued when a trial resumes from a commit, and in its followers.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from packaging.version import Version
from ray.air.execution._internal.tracked_actor import TrackedActor
from ray.train._internal.checkpoint_manager import _TrainingResult as TrainingResult
from ray.train._internal.session import get_session
from ray.tune.execution.class_cache import ENV_VARS_TO_PROPAGATE
from ray.tune.execution.tune_controller import TuneController
from ray.tune.result import RESULT_DUPLICATE, TRAINING_ITERATION, TRIAL_INFO

from fluidtune.errors import FluidTuneError

#: The Ray versions that the tests run on, oldest and newest; pyproject claims the same range.
OLDEST_RAY = "2.44"
NEWEST_RAY = "2.60"

__all__ = [
    "ENV_VARS_TO_PROPAGATE",
    "RESULT_DUPLICATE",
    "TRIAL_INFO",
    "TrackedActor",
    "TrainingResult",
    "TuneController",
    "check_ray_version",
    "controller_of",
    "get_session",
    "pending_again",
]


def check_ray_version(version: str | None = None) -> None:
    """Raise FluidTuneError for a Ray that the tests have never run on."""
    found = Version(version or ray.__version__)
    low, high = Version(OLDEST_RAY), Version(NEWEST_RAY)
    if not (low.release <= found.release[:2] and found.release[:2] <= high.release):
        raise FluidTuneError(
            f"Ray {found} is outside the versions FluidTune is tested on ({OLDEST_RAY} to {NEWEST_RAY}); "
            f'install one of them: pip install "ray[tune]>={OLDEST_RAY},<2.{high.minor + 1}"'
        )


def controller_of(handed: Any) -> TuneController:
    """The TuneController behind what a scheduler is handed (the controller itself or a wrapper of it)."""
    return getattr(handed, "_tune_controller", handed)


def before_cleanup(controller: TuneController, then: Callable[[], None]) -> None:
    """Have ``then`` called when the controller begins to clean up.

    The controller gets a class of its own, as Tune saves its attributes.
    """
    ours = type(controller)

    def cleanup(self: TuneController) -> None:
        then()
        ours.cleanup(self)

    controller.__class__ = type(ours.__name__, (ours,), {"cleanup": cleanup})


def pending_again(controller: TuneController) -> int:
    """How many trials that have run before are pending."""
    return sum(1 for trial in controller._pending_trials if (trial.last_result or {}).get(TRAINING_ITERATION))


def mute_session() -> None:
    """Make this process' function-trainable session swallow reports: it belongs to a follower."""
    session = get_session()
    if session is not None:
        session.report = lambda *args, **kwargs: None


def let_go_on(timeout: float, busy: Callable[[], bool]) -> None:
    """Let a function trainable's loop go on from the report that it stands at, up to its end or its next report.

    For so many seconds, and longer while it is ``busy`` with what must not be cut off. What it raises there is
    dropped. Tune's own way, another ``train()``, looks for the end five times a second.
    """
    session = get_session()
    thread = getattr(session, "training_thread", None)
    if thread is None or not thread.is_alive():
        return
    session.continue_lock.release()
    deadline = time.monotonic() + timeout
    while thread.is_alive() and session.result_queue.empty() and (busy() or time.monotonic() < deadline):
        threading.Thread.join(thread, 0.005)
    with contextlib.suppress(queue.Empty):
        session.error_queue.get_nowait()
