"""Checkpoints of a trial whose iterations run again, in worker processes without Ray's cluster: none is lost."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune import Trainable
from ray.tune.trainable import wrap_function

from fluidtune.cluster.emulated import Emulation
from fluidtune.cluster.hosting.trial_sessions import DEVICE_VARIABLE
from fluidtune.cluster.hosting.worker import Worker
from fluidtune.group_facts import GroupFacts
from fluidtune.profiles import DEFAULT
from tests.cluster.test_worker import fresh, spec
from tests.contracts.processes import peer_processes

pytestmark = [pytest.mark.slow]


def train(config: dict[str, Any]) -> None:
    """Saves a checkpoint at every third iteration, and notes each that it begins."""
    began, checkpoint = 0, tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            began = json.loads(Path(directory, "iteration").read_text())
    for iteration in range(began + 1, 100):
        with open(config["notes"], "a") as file:
            file.write(f"{iteration} ")
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "iteration").write_text(str(iteration))
            kept = tune.Checkpoint.from_directory(directory) if iteration % 3 == 0 else None
            tune.report({"number": iteration}, checkpoint=kept)


class Stepping(Trainable):
    def step(self) -> dict[str, Any]:
        return {"number": self.iteration + 1}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "iteration").write_text(str(self.iteration))

    def load_checkpoint(self, checkpoint_dir: str) -> None: ...


def hosting(folder: str, trainable: Any, delivered: int, restored: Any = None, **more: Any) -> Worker:
    """A worker that has just been given the trial. ``restored``: the newest checkpoint that Tune has."""
    worker, asked = fresh(), spec(folder, delivered, {"notes": f"{folder}/notes"}, **more)
    assert isinstance(worker.load(trainable, asked), GroupFacts)
    if restored is not None:
        worker.restore(restored)
    return worker


def saved_in(worker: Worker, iterations: int) -> list[Any]:
    return [saved for saved in [worker.train().saved for _ in range(iterations)] if saved is not None]


def iteration_in(checkpoint: Any) -> int:
    return int(Path(checkpoint.checkpoint.path, "iteration").read_text())


@pytest.fixture
def in_processes(tmp_path: Path) -> Any:
    """Run functions there, each in its own process, with the trial's folder. What they return goes on to the next."""

    def call(*functions: Callable[..., Any]) -> Any:
        found: Any = None
        for function in functions:
            with peer_processes(1) as (process,):
                found = process.call(function, str(tmp_path), found)
        return found

    return call


def three_of_which_tune_has_one(folder: str, _: Any) -> Any:
    """Its driver has heard of seven results, and died with the first of two checkpoints registered."""
    worker = hosting(folder, wrap_function(train), 0)
    first, *_ = saved_in(worker, 7)
    return first


def the_next_result(folder: str, first: Any) -> Any:
    reply = hosting(folder, wrap_function(train), 7, first).train()
    return reply.result["number"], [(iteration_in(each), each.metrics["number"]) for each in reply.rewritten]


def test_a_checkpoint_of_an_iteration_that_ran_again_reaches_tune(in_processes: Any) -> None:
    # Seen: after the driver's death a trial ran the same iterations again at each loss.
    assert in_processes(three_of_which_tune_has_one, the_next_result) == (8, [(6, 6)])


def a_class_that_was_saved(folder: str, _: Any) -> Any:
    worker = hosting(folder, Stepping, 0, saves_every=3)
    for _ in range(3):
        assert worker.train().rewritten == []
    return worker.save()


def the_next_result_of_a_class(folder: str, first: Any) -> Any:
    reply = hosting(folder, Stepping, 7, first, saves_every=3).train()
    return reply.result["number"], [iteration_in(each) for each in reply.rewritten]


def test_a_class_is_saved_where_tune_would_have_asked_for_it(in_processes: Any) -> None:
    assert in_processes(a_class_that_was_saved, the_next_result_of_a_class) == (8, [6])


def another_trials(folder: str, _: Any) -> Any:
    return a_class_that_was_saved(f"{folder}/donor", None)


def the_results_after_it(folder: str, checkpoint: Any) -> Any:
    found = []
    for again in (False, True):
        worker = hosting(folder, Stepping, 7)
        worker.restore(checkpoint, again)
        found.append(worker.train().result["number"])
    return found


def test_another_trials_checkpoint_is_gone_on_from_and_then_results_that_followed_it_are_known(
    in_processes: Any,
) -> None:
    assert in_processes(another_trials, the_results_after_it) == [4, 8]


def two_checkpoints(folder: str, _: Any) -> Any:
    worker = hosting(folder, wrap_function(train), 0)
    _, second = saved_in(worker, 6)
    return second


def the_next_checkpoint(folder: str, second: Any) -> Any:
    """Tune's count was still that of the first checkpoint when the trial was sent."""
    worker = hosting(folder, wrap_function(train), 6)
    worker._leader.spec.kwargs["storage"].current_checkpoint_index = 0
    worker.restore(second)
    third = [worker.train() for _ in range(3)][-1].saved
    numbers = [int(each.checkpoint.path.rpartition("_")[2]) for each in (second, third)]
    return iteration_in(second), iteration_in(third), *numbers


def test_no_checkpoint_is_written_over_where_tune_registers_it_late(in_processes: Any) -> None:
    # Seen: a checkpoint was written over while its trial was already sent to another process.
    assert in_processes(two_checkpoints, the_next_checkpoint) == (6, 9, 1, 2)


def two_iterations_on_an_emulated_device(folder: str, _: Any) -> None:
    board = f"{folder}/board"
    os.mkdir(board)
    os.environ[DEVICE_VARIABLE] = "0"
    worker = hosting(folder, wrap_function(train), 0, emulation=Emulation(DEFAULT, board))
    for _ in range(2):
        worker.train()
    assert worker.unload(), "it may stand for its device again"


def test_a_trial_that_leaves_an_emulated_device_runs_nothing_more(in_processes: Any, tmp_path: Path) -> None:
    # Seen: it ran one more iteration of the user's code, with its side effects and its checkpoint.
    in_processes(two_iterations_on_an_emulated_device)
    assert (tmp_path / "notes").read_text().split() == ["1", "2"]
    assert not list(tmp_path.rglob("checkpoint_*"))
