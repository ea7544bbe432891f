"""A trial's function leaves no run of MLflow open, whose status says how the function ended. MLflow is a stand-in."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from fluidtune.cluster.hosting.leader_host import end_runs
from fluidtune.cluster.hosting.train_workers import TooFewDevices
from fluidtune.elastic import BeginsAnew, Left
from fluidtune.ray_compat import trainable


class MLflow(threading.local):
    """Each thread has runs of its own, as in `mlflow.tracking.fluent`."""

    def __init__(self, ended: list[str]) -> None:
        self.ended, self.open = ended, 0

    def start_run(self) -> None:
        self.open += 1

    def active_run(self) -> int | None:
        return self.open or None

    def end_run(self, status: str) -> None:
        self.open -= 1
        self.ended.append(status)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MLflow:
    module = MLflow([])
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (None, "FINISHED"),
        (SystemExit(0), "FINISHED"),
        (ValueError("its code"), "FAILED"),
        (Left(), "FINISHED"),
        (BeginsAnew("the proof has failed"), "KILLED"),
        (TooFewDevices(3, 1), "KILLED"),
    ],
)
def test_runs_end_in_the_functions_own_thread(
    mlflow: MLflow, monkeypatch: pytest.MonkeyPatch, raised: BaseException | None, status: str
) -> None:
    def function() -> str:
        mlflow.start_run()
        mlflow.start_run()
        if raised is not None:
            raise raised
        return "its value"

    thread = threading.Thread(target=function)
    trainable.after_function(thread, end_runs)
    heard: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: heard.append(told.exc_value))
    thread.start()
    thread.join()
    assert mlflow.ended == [status] * 2
    assert heard == ([] if raised is None else [raised])


def test_a_module_by_that_name_that_is_not_mlflow_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    end_runs(None)
