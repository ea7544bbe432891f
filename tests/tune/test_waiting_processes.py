"""Processes of paused trials wait where they stand, and the trials go on there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune.schedulers import HyperBandScheduler, PopulationBasedTraining

from fluidtune import FluidExecutor
from tests.tune.running import events_of, fit
from tests.tune.trainables import Stepper

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray2")]

#: Trials of a bracket; each reports at most so many times, and a third goes on at each third of that.
TRIALS, LAST = 9, 9


def counting(config: dict[str, Any]) -> None:
    """Has no checkpoint: stock begins it anew after each pause. ``kill``: the fourth trial kills the first one."""
    begun, own = Path(config["folder"], "begun"), str(os.getpid())
    if not begun.exists() or own not in begun.read_text():
        with begun.open("a") as file:
            file.write(f"{own} {config['x']}\n")
        first, *others = begun.read_text().splitlines()
        if config["kill"] and len(others) == 3:  # on two devices, so that the first one is paused
            os.kill(int(first.split()[0]), signal.SIGKILL)
    for count in range(1, LAST + 1):
        tune.report({"score": config["x"], "count": count, "pid": os.getpid()})


class Counting(Stepper):
    """Has checkpoints, and a counter that none of them holds."""

    counted = 0

    def step(self) -> dict[str, Any]:
        self.counted += 1
        return {**super().step(), "score": self.x, "count": self.counted, "steps": self.at}


def columns(results: Any, name: str) -> dict[int, list[int]]:
    return {each.config["x"]: list(each.metrics_dataframe[name]) for each in results}


def hyperband(trainable: Any, folder: Path, **more: Any) -> Any:
    space = {"x": tune.grid_search(list(range(1, TRIALS + 1))), "folder": str(folder), "kill": False}
    executor = FluidExecutor(devices="cpu:2", parked_memory=more.pop("parked_memory", 0.25))
    scheduler = HyperBandScheduler(max_t=LAST, reduction_factor=3)
    options = {"scheduler": scheduler, "metric": "score", "mode": "max", "executor": executor}
    return fit("fluid", trainable, {**space, **more}, folder, **options)


@pytest.mark.core
@pytest.mark.parametrize("trainable", [counting, Counting])
def test_a_paused_trial_goes_on_where_it_stands(trainable: Any, tmp_path: Path) -> None:
    """With what is in its memory: nothing is started, restored or done twice for it."""
    results = hyperband(trainable, tmp_path)
    for counts in columns(results, "count").values():
        assert counts == list(range(1, len(counts) + 1))
    assert sorted(len(counts) for counts in columns(results, "count").values())[0] < LAST, "some were paused for good"
    events = events_of(tmp_path)
    resumed = [event for event in events if event["event"] == "trial_started" and event["resumed"]]
    assert resumed and not [event for event in events if event["event"] in ("recovered", "worker_lost")]
    assert {len(set(pids)) for pids in columns(results, "pid").values()} == {1}


def test_pressed_memory_ends_the_one_that_waits_longest(tmp_path: Path) -> None:
    """A 20,000th of this machine's memory is less than one process has. All end, and are restored."""
    results = hyperband(Counting, tmp_path, parked_memory=1 / 20_000)
    assert all(steps == list(range(1, len(steps) + 1)) for steps in columns(results, "steps").values())
    assert any(len(set(pids)) > 1 for pids in columns(results, "pid").values())


def test_a_process_that_is_killed_while_it_waits(tmp_path: Path) -> None:
    """Its trial begins anew if it is to go on, as under stock; the others go on where they stand."""
    results = hyperband(counting, tmp_path, kill=True)
    killed = int(Path(tmp_path, "begun").read_text().split()[1])
    pids = columns(results, "pid")
    assert len(set(pids.pop(killed))) <= 2
    assert {len(set(each)) for each in pids.values()} == {1}
    assert all(counts == list(range(1, len(counts) + 1)) for counts in columns(results, "count").values())


@pytest.mark.parametrize("synch", [True, False])
def test_a_trial_that_takes_anothers_checkpoint_is_restored(synch: bool, tmp_path: Path) -> None:
    """Also where its own result is what it is exploited upon. Seen: it kept its own state and configuration."""
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=3,
        synch=synch,
        hyperparam_mutations={"x": [1, 2, 3, 4]},
        quantile_fraction=0.25,
        resample_probability=0.0,
    )
    executor = FluidExecutor(devices="cpu:2")
    space = {"x": tune.grid_search([1, 2, 3, 4])}
    options = {"scheduler": scheduler, "metric": "score", "mode": "max", "executor": executor}
    results = fit("fluid", Counting, space, tmp_path, run={"stop": {"training_iteration": 9}}, **options)
    found = [(list(each.metrics_dataframe["count"]), list(each.metrics_dataframe["steps"])) for each in results]
    assert [each.metrics["score"] for each in results] == [each.config["x"] for each in results]
    assert not synch or all(steps == list(range(1, 10)) for _, steps in found)
    in_place = [counts for counts, _ in found if counts == list(range(1, 10))]
    assert 2 <= len(in_place) < 4, "those that took no checkpoint waited"
