"""One process serves one trial, unless the script reuses its actors. The event log of the run is complete."""

from __future__ import annotations

import atexit
import gc
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray import tune
from ray.tune import CheckpointConfig
from ray.tune.experiment import Trial

from fluidtune import FluidExecutor, Tuner
from tests.tune.running import events_of, fit, forks_ready

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray2")]


def changing(config: dict[str, Any]) -> None:
    """Reports what it found in its process, and changes that."""
    found = {
        "pid": os.getpid(),
        "variable": os.environ.get("A_TRIALS_OWN", "none"),
        "drawn": float(torch.rand(())),
        "python": random.random(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cwd": os.getcwd(),
    }
    os.environ["A_TRIALS_OWN"] = "here"
    os.chdir("/")
    tune.report({"score": 1.0, **found})


@pytest.mark.core
@pytest.mark.parametrize("reuse", [False, True])
def test_a_process_serves_further_trials_only_where_the_script_says_so(tmp_path: Path, reuse: bool) -> None:
    forks_ready()
    space, executor = {"x": tune.grid_search([1, 2, 3])}, FluidExecutor(devices="cpu:1")
    results = fit("fluid", changing, space, tmp_path, executor=executor, reuse_actors=reuse)
    found = [result.metrics for result in results]
    assert len({each["pid"] for each in found}) == (1 if reuse else 3)
    # As under stock Ray Tune nothing is put back.
    assert [each["variable"] for each in found] == ["none", *["here" if reuse else "none"] * 2]
    for key in ("python", "drawn", "cwd"):  # Tune gives each trial a directory of its own
        assert len({each[key] for each in found}) == 3, key
    assert {each["gpus"] for each in found} == {""}  # Seen: with Ray 2.60, a worker without a GPU saw all of them
    assert not events_of(tmp_path, "worker_killed", "worker_lost")
    # Seen: the driver kept an answer of each trial's process, with what Ray holds for it.
    trials = [each for each in gc.get_objects() if isinstance(each, Trial)]
    assert not any(isinstance(value, ray.ObjectRef) for trial in trials for value in vars(trial).values()) and trials


def fails_at_first(config: dict[str, Any]) -> None:
    if not Path(config["repaired"]).exists():
        raise RuntimeError("as ordered")
    changing(config)


@pytest.mark.newest
def test_a_run_that_is_restored_uses_its_processes_again_if_its_script_says_so(tmp_path: Path) -> None:
    """Seen: it had a new process for each trial."""
    repaired = tmp_path / "repaired"
    space, executor = {"x": tune.grid_search([1, 2]), "repaired": str(repaired)}, FluidExecutor(devices="cpu:1")
    fit("fluid", fails_at_first, space, tmp_path, executor=executor, reuse_actors=True, fails=2)
    repaired.touch()
    results = Tuner.restore(str(tmp_path / "fluid"), fails_at_first, resume_errored=True).fit()
    assert not results.errors and len({result.metrics["pid"] for result in results}) == 1


def leaves_a_note(config: dict[str, Any]) -> None:
    """Its handler writes when the process ends; a trial whose ``x`` is odd also leaves a thread, and ends early."""
    note = Path(config["notes"], str(config["x"]))
    atexit.register(lambda: note.write_text("written at exit"))
    if config["x"] % 2:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    for _ in range(config["x"] % 2 + 1):
        tune.report({"score": 1.0, "pid": os.getpid()})


def test_exit_handlers_run_whatever_becomes_of_the_process(tmp_path: Path) -> None:
    # Seen: exit handlers of a trial never ran, and an unclosed log writer lost its records.
    notes = tmp_path / "notes"
    notes.mkdir()
    space = {"x": tune.grid_search(list(range(4))), "notes": str(notes)}
    stop = {"stop": {"training_iteration": 1}}
    fit("fluid", leaves_a_note, space, tmp_path, executor=FluidExecutor(devices="cpu:2"), run=stop)
    assert sorted(path.name for path in notes.iterdir()) == ["0", "1", "2", "3"]


class Lingering(tune.Trainable):
    """Cleans up for longer than the 5 s that Tune waits for actors at the end of a run."""

    def setup(self, config: dict[str, Any]) -> None:
        self.note = Path(config["note"])

    def step(self) -> dict[str, Any]:
        return {"score": 1.0, "done": True}

    def cleanup(self) -> None:
        time.sleep(7)
        self.note.write_text("cleaned up")


def test_a_trainable_that_cleans_up_for_seven_seconds_comes_to_its_end(tmp_path: Path) -> None:
    note = tmp_path / "note"
    run = {"checkpoint_config": CheckpointConfig(checkpoint_at_end=False)}
    fit("fluid", Lingering, {"x": 0, "note": str(note)}, tmp_path, run=run)
    assert note.read_text() == "cleaned up"
