"""A worker process that hosts trials, without Ray's cluster: each test calls its methods as a driver would."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import LocalFileSystem
from ray.tune import Trainable

from fluidtune.cluster import worker as worker_module
from fluidtune.cluster.worker import LoadSpec, Worker
from tests.elastic.processes import workers


class Storage:
    """A trial's directory."""

    def __init__(self, folder: str) -> None:
        self.trial_fs_path = folder
        self.storage_filesystem = LocalFileSystem()


class Counting(Trainable):
    """An elastic class trainable whose only weight is the number of its steps, which it reports and saves."""

    def setup(self, config: dict[str, Any]) -> None:
        import torch

        from fluidtune import elastic

        self.module = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self.module.weight)
        self.module = elastic.prepare(self.module)

    def step(self) -> dict[str, Any]:
        self.module.weight.data += 1
        return {"steps": self.module.weight.item(), "iteration_before": self.iteration}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "steps").write_text(str(self.module.weight.item()))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.module.weight.data.fill_(float(Path(checkpoint_dir, "steps").read_text()))


def hosting(folder: str, delivered: int = 0) -> Worker:
    """A process that has taken the place of one that hosted the trial and died."""
    from fluidtune.elastic import use

    use(None)
    worker_module._storage = lambda spec: Storage(folder)
    worker = Worker("w", {})
    assert worker.load(Counting, LoadSpec("trial", {"config": {}}, delivered=delivered)) is None
    return worker


def train(worker: Worker, iterations: int, commits: bool = True) -> list[dict[str, Any]]:
    """The results of so many iterations, each of which a commit goes before if ``commits``."""
    assert worker._session is not None and worker._session._commits is not None
    worker._session._commits._budget = 1e9 if commits else -1.0
    results = []
    for _ in range(iterations):
        results.append(worker.train().result)
        worker._session._commits.flush()
    return results


@pytest.fixture
def in_a_process(tmp_path: Path) -> Any:
    """Run a function there, with a folder for the trial."""
    with workers(1) as (process,):

        def call(fn: Callable[..., Any], *args: Any) -> Any:
            return process.call(fn, str(tmp_path), *args)

        yield call


def saved_after_a_loss(folder: str) -> None:
    train(hosting(folder), 5)  # the last commit is of iteration 4
    for delivered in (4, 5):
        again = hosting(folder, delivered)
        kept = again.save(os.path.join(folder, f"kept-{delivered}"))
        assert kept.checkpoint is not None
        steps = Path(kept.checkpoint.path, "steps").read_text()
        assert steps == f"{delivered}.0", steps
        assert train(again, 1)[0]["steps"] == delivered + 1


def test_a_save_that_comes_first_after_a_loss_has_what_was_trained(in_a_process: Any) -> None:
    in_a_process(saved_after_a_loss)


def moved(folder: str, saved: int) -> None:
    train(hosting(folder), 6)  # the last commit is of iteration 5
    second = hosting(folder, delivered=6)
    train(second, 3)
    # The driver dies; what Tune saved last is older than the worker that was the trial's when it died
    again = hosting(folder, delivered=saved)
    results = train(again, 11 - saved)
    assert [(r["training_iteration"], r["steps"]) for r in results] == [(i, i) for i in range(saved + 1, 12)]
    ran_again = again._trainable is not None and again._trainable._iterations_since_restore
    assert ran_again == 3, f"it has results up to 8 in its commit, and ran {ran_again} iterations"


@pytest.mark.parametrize("saved", [3, 5, 6, 8])
def test_a_moved_trials_commit_has_what_was_reported_before(in_a_process: Any, saved: int) -> None:
    in_a_process(moved, saved)


def restored_past_its_commit(folder: str) -> None:
    first = hosting(folder)
    train(first, 5)
    train(first, 2, commits=False)
    checkpoint = first.save(os.path.join(folder, "kept"))
    again = hosting(folder, delivered=7)
    again.restore(checkpoint)
    results = train(again, 2)
    assert [(r["training_iteration"], r["steps"]) for r in results] == [(8, 8), (9, 9)]
    # The next one goes on from the commit of 8 that was made meanwhile
    third = hosting(folder, delivered=9)
    third.restore(checkpoint)
    assert [(r["training_iteration"], r["steps"]) for r in train(third, 1)] == [(10, 10)]


def test_a_checkpoint_that_is_newer_than_the_commit_is_gone_on_from(in_a_process: Any) -> None:
    in_a_process(restored_past_its_commit)
