"""A trial's own process: its trainable, its train session, and the keys of its configuration and results."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import ray
from ray.train._internal.checkpoint_manager import _TrainingResult as TrainingResult
from ray.train._internal.session import get_session
from ray.tune import Trainable
from ray.tune.execution.class_cache import ENV_VARS_TO_PROPAGATE
from ray.tune.registry import _ParameterRegistry
from ray.tune.result import (
    AUTO_RESULT_KEYS,
    EPISODES_TOTAL,
    EXPR_PROGRESS_FILE,
    EXPR_RESULT_FILE,
    RESULT_DUPLICATE,
    SHOULD_CHECKPOINT,
    TIME_TOTAL_S,
    TIMESTEPS_TOTAL,
    TRAINING_ITERATION,
    TRIAL_INFO,
)
from ray.tune.trainable import FunctionTrainable
from ray.tune.trainable import trainable as trainable_module

#: The keys of a result that Tune fills in.
FILLED_IN = frozenset(AUTO_RESULT_KEYS)
#: Ray's names that are used elsewhere.
__all__ = ["ENV_VARS_TO_PROPAGATE", "EPISODES_TOTAL", "EXPR_PROGRESS_FILE", "EXPR_RESULT_FILE", "RESULT_DUPLICATE"]
__all__ += ["TIMESTEPS_TOTAL", "TIME_TOTAL_S", "TRAINING_ITERATION", "TRIAL_INFO", "TrainingResult"]

#: A checkpoint's directory in that of its trial, before its number. Source: Tune's `StorageContext`.
_CHECKPOINT = "checkpoint"
#: Seconds between two looks whether the loop has reported.
_LOOK_S = 0.005


def leave_ipython_out() -> None:
    """Do not let each trial import IPython where it is installed: Tune does, to end a shell that no worker has."""
    trainable_module.disable_ipython = lambda: None


def time_total(trainable: Trainable) -> float:
    """Return the seconds that the trial has trained, as Tune counts them."""
    return trainable._time_total


def own_totals(trainable: Trainable) -> tuple[Any, Any]:
    """Return Tune's sums of the trial's ``timesteps_this_iter`` and ``episodes_this_iter``.

    None: the trial has reported none.
    """
    return trainable._timesteps_total, trainable._episodes_total


def set_progress(
    trainable: Trainable, iteration: int, seconds: float, timesteps: Any = None, episodes: Any = None
) -> None:
    """Let Tune's counts of the trial's iterations, of its training time, and `own_totals` go on from these."""
    trainable._iteration, trainable._time_total = iteration, seconds
    trainable._timesteps_total, trainable._episodes_total = timesteps, episodes


def has_reported(trainable: FunctionTrainable) -> bool:
    """Return whether the function has reported since this trainable was constructed."""
    return bool(getattr(trainable, "_last_training_result", None))


def count_checkpoint(storage: Any, saved: TrainingResult, *, counted: bool) -> None:
    """Let the trial's next checkpoint have a number above this one's, so that none is written over.

    ``counted``: the storage's count is to have this one already; else Tune counts one more for it.
    """
    if saved.checkpoint is None:
        return
    prefix, _, number = PurePath(saved.checkpoint.path).name.rpartition("_")
    if prefix == _CHECKPOINT and number.isdecimal():
        least = int(number) if counted else int(number) - 1
        storage.current_checkpoint_index = max(storage.current_checkpoint_index, least)


def saved_with_result(trainable: Trainable, result: dict[str, Any]) -> Any:
    """Return what Tune's ``save`` returns after this ``result``, if that is known already; None: it is not.

    A function's checkpoint comes with its result and is stored by then. Tune asks for it by a further call.
    """
    if not isinstance(trainable, FunctionTrainable) or not result.get(SHOULD_CHECKPOINT):
        return None
    kind = type(trainable)
    if kind.save is not Trainable.save or kind.save_checkpoint is not FunctionTrainable.save_checkpoint:
        return None
    return trainable.save()


def training_thread() -> threading.Thread | None:
    """Return the thread that runs this process' training function; None: there is none."""
    return getattr(get_session(), "training_thread", None)


def after_function(thread: Any, ended: Callable[[BaseException | None], None]) -> None:
    """Have the training function of ``thread``, which has not begun, call ``ended`` there when it has ended.

    ``ended`` gets what the function has raised; None: it has returned. Tune ends a function by a SystemExit.
    """
    function = thread._target

    def whole() -> Any:
        try:
            result = function()
        except BaseException as error:
            ended(error)
            raise
        ended(None)
        return result

    thread._target = whole


def finish_report(timeout: float, busy: Callable[[], bool]) -> None:
    """Let the training function go on from the report at which it stands, to its next report or its end.

    It gets ``timeout`` seconds, and longer while ``busy`` returns True, which means that it must not be interrupted.
    What it raises is dropped. Tune's own way is another ``train()``, which looks for the end only five times a second.
    """
    session = get_session()
    thread = getattr(session, "training_thread", None)
    if thread is None or not thread.is_alive():
        return
    session.continue_lock.release()
    deadline = time.monotonic() + timeout
    while thread.is_alive() and session.result_queue.empty() and (busy() or time.monotonic() < deadline):
        threading.Thread.join(thread, _LOOK_S)
    with contextlib.suppress(queue.Empty):
        session.error_queue.get_nowait()


def get_parameters_by(get: Callable[[ray.ObjectRef], Any]) -> None:
    """From now on the trials of this process get what ``tune.with_parameters`` has put into the object store by it."""
    _ParameterRegistry.get = lambda registry, name: get(registry.references[name])
