"""A trial's process and its train session are as we use them. Needs no running Ray."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune import Trainable
from ray.tune.trainable import FunctionTrainable

from fluidtune.ray_compat import trainable as compat


def test_a_trainable_counts_on_from_what_it_is_given() -> None:
    trainable = Trainable.__new__(Trainable)
    compat.set_progress(trainable, 7, 2.5)
    assert (trainable.iteration, compat.time_total(trainable)) == (7, 2.5)
    assert compat.own_totals(trainable) == (None, None)
    compat.set_progress(trainable, 9, 2.5, 300, 4)
    assert compat.own_totals(trainable) == (300, 4)


def test_a_loop_that_writes_its_last_commit_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, writes, written = threading.Semaphore(0), threading.Event(), []

    def loop() -> None:
        lock.acquire()
        writes.set()
        time.sleep(0.3)
        written.append(True)
        writes.clear()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    session = SimpleNamespace(
        training_thread=thread, continue_lock=lock, result_queue=queue.Queue(), error_queue=queue.Queue()
    )
    monkeypatch.setattr(compat, "get_session", lambda: session)
    assert compat.training_thread() is thread
    compat.finish_report(timeout=0.1, busy=writes.is_set)
    assert written


class Function(FunctionTrainable):
    """A function trainable that has reported once."""

    def __init__(self, checkpoint: Any) -> None:
        self._last_training_result = compat.TrainingResult(checkpoint, {"loss": 1.0})
        self._last_result = {"loss": 1.0, "training_iteration": 3}


class OwnSave(Function):
    def save_checkpoint(self, checkpoint_dir: str = "") -> Any:
        raise AssertionError("it was not asked for")


def test_the_checkpoint_that_a_function_reported_is_known_without_a_call() -> None:
    trainable = Function("a checkpoint")
    saved = compat.saved_with_result(trainable, {"loss": 1.0, compat.SHOULD_CHECKPOINT: True})
    assert (saved.checkpoint, saved.metrics) == ("a checkpoint", {"loss": 1.0, "training_iteration": 3})
    assert saved is trainable.save(), "it is what Tune would get"


@pytest.mark.parametrize(
    ("trainable", "result"),
    [
        (Function(None), {"loss": 1.0}),
        (OwnSave("a checkpoint"), {compat.SHOULD_CHECKPOINT: True}),
        (Trainable.__new__(Trainable), {compat.SHOULD_CHECKPOINT: True}),
    ],
    ids=["no checkpoint", "its own way to save", "a class"],
)
def test_tune_asks_for_every_other_checkpoint(trainable: Any, result: dict[str, Any]) -> None:
    assert compat.saved_with_result(trainable, result) is None
