"""One process serves trial after trial, unless a trial left it dirty. The event log of the run is complete."""

from __future__ import annotations

import atexit
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray import tune
from ray.tune import CheckpointConfig

from fluidtune import FluidExecutor
from fluidtune.cluster.hosting.worker import Worker
from fluidtune.report import EVENT_LOG_NAME, occupancy_of, read_events, summarise
from tests.tune.running import events_of, fit, forks_ready

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray2")]

_kept: list[Any] = []


def messy(config: dict[str, Any]) -> None:
    """Reports what it found in its process, then leaves behind what ``x`` names."""
    found = {
        "pid": os.getpid(),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.empty(0).device),
        "drawn": float(torch.rand(())),
        "python": random.random(),
        "variable": os.environ.get("A_TRIALS_OWN", "none"),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cwd": os.getcwd(),
    }
    leaves = config["x"]
    if leaves == "thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    elif leaves == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    elif leaves == "memory":
        _kept.append(bytearray(b"x") * (1200 << 20))
    elif leaves == "settings":
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.manual_seed(1)
        random.seed(1)
        os.environ["A_TRIALS_OWN"] = "here"
        os.chdir("/")
    tune.report({"score": 1.0, **found})


@pytest.mark.newest
def test_as_many_processes_start_at_a_time_as_there_are_cores(tmp_path: Path) -> None:
    space = {"x": tune.grid_search(list(range(6)))}
    results = fit("fluid", messy, space, tmp_path, executor=FluidExecutor(devices="emulated:6", max_packing=1))
    assert len(results) == 6 and not results.errors
    started = events_of(tmp_path, "worker_started")
    assert len(started) >= 6
    begun = [(e["t"] - e["seconds"], e["t"]) for e in started]
    assert max(sum(asked <= moment < there for asked, there in begun) for moment, _ in begun) == 2


def one_after_the_other(path: Path, leave: list[str]) -> tuple[list[dict[str, Any]], Any]:
    forks_ready()
    results = fit("fluid", messy, {"x": tune.grid_search(leave)}, path, executor=FluidExecutor(devices="cpu:1"))
    assert not results.errors
    return [r.metrics for r in results], events_of(path)


@pytest.mark.core
def test_a_worker_serves_trial_after_trial_as_if_new(tmp_path: Path) -> None:
    found, events = one_after_the_other(tmp_path, ["settings", "settings", "nothing", "settings", "nothing2"])
    assert len({f["pid"] for f in found}) == 1
    for key in ("dtype", "device", "variable"):
        assert len({f[key] for f in found}) == 1, f"{key}: {[f[key] for f in found]}"
    assert {f["gpus"] for f in found} == {""}  # docs/bugs.md, 353: Ray 2.60 lets a worker without a GPU see all
    assert found[0]["dtype"] == "torch.float32" and found[0]["variable"] == "none"
    for key in ("python", "drawn"):
        assert len({f[key] for f in found}) == len(found), f"{key}: a fresh process draws something else every time"
    # Tune gives each trial a directory of its own.
    assert len({f["cwd"] for f in found}) == len(found)
    counted = Counter(e["event"] for e in events)
    assert counted["worker_started"] == 1 and counted["worker_replaced"] == 0


@pytest.mark.core
def test_a_worker_that_was_left_dirty_is_replaced(tmp_path: Path) -> None:
    found, events = one_after_the_other(tmp_path, ["thread", "a", "child", "b", "memory", "c"])
    pids = [f["pid"] for f in found]
    for dirty in (0, 2, 4):  # a clean one, or the spare that was started beside it, serves the next trial
        assert pids[dirty] not in pids[dirty + 1 :]
    reasons = [e["reason"] for e in events if e["event"] == "worker_replaced"]
    assert [reason.split()[0] for reason in reasons] == ["threads", "processes", "memory"]


def leaves_a_note(config: dict[str, Any]) -> None:
    """Its handler writes when the process ends; a trial whose ``x`` is odd also leaves a thread, and ends early."""
    note = Path(config["notes"], str(config["x"]))
    atexit.register(lambda: note.write_text("written at exit"))
    if config["x"] % 2:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    for _ in range(config["x"] % 2 + 1):
        tune.report({"score": 1.0, "pid": os.getpid()})


def test_exit_handlers_run_whatever_becomes_of_the_process(tmp_path: Path) -> None:
    # docs/bugs.md, 120
    notes = tmp_path / "notes"
    notes.mkdir()
    space = {"x": tune.grid_search(list(range(4))), "notes": str(notes)}
    stop = {"stop": {"training_iteration": 1}}
    results = fit("fluid", leaves_a_note, space, tmp_path, executor=FluidExecutor(devices="cpu:2"), run=stop)
    assert not results.errors
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
    # docs/bugs.md, 300
    note = tmp_path / "note"
    run = {"checkpoint_config": CheckpointConfig(checkpoint_at_end=False)}
    results = fit("fluid", Lingering, {"x": 0, "note": str(note)}, tmp_path, run=run)
    assert not results.errors and note.read_text() == "cleaned up"


@pytest.mark.newest
@pytest.mark.parametrize("said", ["fresh_workers=True", "reuse_actors=False"])
def test_fresh_workers_are_new_processes(said: str, tmp_path: Path) -> None:
    executor = FluidExecutor(devices="cpu:1", fresh_workers=said == "fresh_workers=True")
    config = {"reuse_actors": False} if said == "reuse_actors=False" else {}
    results = fit("fluid", messy, {"x": tune.grid_search(["a", "b"])}, tmp_path, executor=executor, **config)
    assert len({result.metrics["pid"] for result in results}) == 2
    events = events_of(tmp_path)
    reasons = [e["reason"] for e in events if e["event"] == "worker_replaced"]
    assert reasons == [f"{said}: a new process for each trial"] * 2


@pytest.mark.newest
def test_pictures_and_summary_of_a_complete_event_log(tmp_path: Path) -> None:
    from tests.tune.trainables import with_checkpoints

    # Long enough for the second device to be there, though the job before has just given it back.
    space = {"x": tune.grid_search([0, 1, 2]), "n": 4, "pause": 0.2}
    results = fit("fluid", with_checkpoints, space, tmp_path)
    directory = tmp_path / "fluid"
    events = read_events(directory / EVENT_LOG_NAME)
    assert events.dropped == 0
    assert events[0]["event"] == "run_started" and events[-1]["event"] == "run_ended"
    trials = {r.metrics["trial_id"] for r in results}
    for trial in trials:
        own = [e for e in events if e.get("trial") == trial]
        assert [e["event"] for e in own if e["event"] != "kind_found"] == [
            "trial_added",
            "trial_started",
            *["trial_result"] * 4,
            "trial_ended",
        ]
        assert [e["iteration"] for e in own if e["event"] == "trial_result"] == [1, 2, 3, 4]
        assert own[-1]["ending"] == "stopped"
    best = results.get_best_result()
    assert events[-1]["trials"] == 3
    assert events[-1]["best"] == {"trial": best.metrics["trial_id"], "metric": best.metrics["score"]}
    summary = summarise(events)
    assert summary.finished and summary.trials == 3 and summary.devices == 2
    assert 0 < summary.utilisation <= 1
    occupancy_of(events)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fluid-")]
    for name in ("timeline.png", "utilisation.png", "summary.json"):
        assert (directory / name).stat().st_size > 100


@pytest.mark.newest
def test_a_worker_imports_ray_tune_with_few_collections_of_garbage() -> None:
    # Classes of a function go to their processes by value, so that these import nothing else.
    class Looking(Worker):
        def seen(self) -> tuple[tuple[int, int, int], int]:
            """The garbage collector's thresholds, and how often it has collected the youngest objects so far."""
            return gc.get_threshold(), gc.get_stats()[0]["collections"]

    class Bare:
        def seen(self) -> int:
            return gc.get_stats()[0]["collections"]

    worker = ray.remote(Looking).options(num_cpus=0).remote("w", {})
    bare = ray.remote(Bare).options(num_cpus=0).remote()
    (thresholds, collections), before = ray.get([worker.seen.remote(), bare.seen.remote()])
    assert thresholds[0] >= 100 * gc.get_threshold()[0]
    assert collections - before < 50
    ray.kill(worker)
    ray.kill(bare)
