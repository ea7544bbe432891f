"""Ray Train inside a trial: what it has started ends with the trial, however the trial ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from fluidtune import FluidExecutor
from fluidtune.report import EVENT_LOG_NAME, read_events
from fluidtune.report.fold import Holdings
from tests.conftest import left_in_cluster, wait_until_nothing
from tests.tune.running import ROOT, events_of, fit, run_both_ways

pytestmark = pytest.mark.ray

ITERATIONS = 10


@pytest.fixture
def train_v2(no_ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray of its own, whose processes find what Ray 2.44 wants for Train V2. It has no dashboard."""
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield


def assert_trials_left_nothing() -> None:
    """Ray Data has one detached actor a cluster, which Ray Train starts in Ray 2.60."""
    # Ray Train's coordinator is one for the cluster, and holds a little of the head.
    known = ("AutoscalingCoordinator", "node:__internal_head__")
    wait_until_nothing(lambda: [each for each in left_in_cluster() if not any(name in each for name in known)])


def reporting(loop: dict[str, Any]) -> None:
    for _ in range(ITERATIONS):
        ray.train.report({"score": -float(loop["x"])})
        time.sleep(0.2)


def driving(config: dict[str, Any]) -> None:
    """The trial of Ray's guide: it drives a run of Ray Train, here with one worker unless it is told otherwise."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    name = f"{tune.get_context().get_trial_id()}-{os.getpid()}"
    TorchTrainer(
        reporting,
        train_loop_config={"x": config["x"]},
        scaling_config=ScalingConfig(num_workers=config.get("workers", 1)),
        run_config=RunConfig(name=name, storage_path=config["storage"], callbacks=[TuneReportCallback()]),
    ).fit()


def killed_once(config: dict[str, Any]) -> None:
    """Its process is killed when its Train worker runs, the first time."""

    def kill() -> None:
        while not Path(config["storage"]).exists():
            time.sleep(0.1)
        Path(config["killed"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if not Path(config["killed"]).exists():
        threading.Thread(target=kill, daemon=True).start()
    driving(config)


def held_at_most(events: list[dict[str, Any]], devices: int) -> int:
    """The most devices that trials held at a time. Each that came to report held ``devices``, and shared none."""
    use, most = Holdings(), 0
    for event in events:
        use.step(event)
        held = [device for each in use.held.values() for device in each.devices]
        assert len(set(held)) == len(held), event
        assert event["event"] != "trial_result" or len(use.of(event["trial"]).devices) == devices, event
        most = max(most, len(held))
    return most


@pytest.mark.timeout(900)  # each of the six trials starts four processes
def test_six_trials_of_which_most_are_stopped_end_and_leave_nothing(train_v2: None, tmp_path: Path) -> None:
    # Seen: four trials began at once and waited for ever for a core for a worker; stopped ones left placement groups.
    space = {"x": tune.grid_search(list(range(6))), "storage": str(tmp_path / "train")}
    asha = ASHAScheduler(max_t=ITERATIONS, grace_period=1, reduction_factor=2)
    results = fit("fluid", driving, space, tmp_path, executor=FluidExecutor(), scheduler=asha)
    assert len(results) == 6
    assert sum(result.metrics["training_iteration"] < ITERATIONS for result in results) >= 3
    assert held_at_most(events_of(tmp_path), 2) == 4
    assert_trials_left_nothing()


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_killed_trial_is_retried_and_nothing_is_left_of_the_first_attempt(train_v2: None, tmp_path: Path) -> None:
    space = {"x": 1, "storage": str(tmp_path / "train"), "killed": str(tmp_path / "killed")}
    (result,) = fit("fluid", killed_once, space, tmp_path, executor=FluidExecutor())
    assert (tmp_path / "killed").exists() and result.metrics["training_iteration"] == ITERATIONS
    assert events_of(tmp_path, "worker_lost")
    assert_trials_left_nothing()


def test_a_train_function_with_three_changed_lines_grows(no_ray: None, tmp_path: Path) -> None:
    example = ROOT / "examples" / "digits_train.py"
    assert sum(line.endswith("# elastic") for line in example.read_text().splitlines()) == 3
    script = [str(example), "--samples", "1", "--epochs", "100"]
    stock, ours = run_both_ways(script, lambda name: ["--storage", str(tmp_path / name)], r"best accuracy (\S+)")
    assert float(stock) == pytest.approx(float(ours), abs=0.01), (stock, ours)
    events = read_events(tmp_path / "ours" / "digits_train" / EVENT_LOG_NAME)
    assert 2 in [len(event["devices"]) for event in events if event["event"] == "resized"]
