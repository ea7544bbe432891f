"""Under FluidTune a synchronous algorithm decides as under stock Tune, and an asynchronous one has a valid run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune.schedulers import (
    FIFOScheduler,
    HyperBandScheduler,
    PopulationBasedTraining,
)
from ray.tune.search import Repeater
from ray.tune.search.optuna import OptunaSearch

from fluidtune.report import summarise
from tests.contracts.processes import until
from tests.tune.running import Recorder, events_of, fit, outcome
from tests.tune.trainables import Stepper

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray2")]

GRID = {"x": tune.grid_search([0, 1, 2, 3])}


def run(side: str, path: Path, scheduler: Any, space: Any = GRID, trainable: Any = Stepper, **config: Any) -> Any:
    recorder = Recorder()
    settings = {"callbacks": [recorder], "stop": config.pop("stop", {"training_iteration": 6})}
    results = fit(side, trainable, space, path, scheduler=scheduler, run=settings, **config)
    return results, recorder


def shifted(config: dict[str, Any]) -> dict[str, Any]:
    """Explore without random draws, so that no two trials become equal."""
    return {**config, "x": (config["x"] + 5) % 9}


def population() -> PopulationBasedTraining:
    return PopulationBasedTraining("training_iteration", perturbation_interval=2, custom_explore_fn=shifted, synch=True)


@pytest.mark.core
def test_synchronous_pbt_exploits_and_explores_as_under_stock_tune(tmp_path: Path) -> None:
    sides = [run(side, tmp_path, population())[0] for side in ("stock", "fluid")]
    assert outcome(sides[1], "at") == outcome(sides[0], "at")
    assert [x for x, *_ in outcome(sides[0])] != [0, 1, 2, 3], "no trial exploited another: nothing was tested"
    groups = {e["group"] for e in events_of(tmp_path, "group_announced")}
    assert groups == {"interval1", "interval2", "interval3"}
    # The engine plans an interval as a whole: all of its trials are known before one of them has run in it.
    for number, first in ((2, 3), (3, 5)):
        added = [e["t"] for e in events_of(tmp_path, "trial_added") if e["group"] == f"interval{number}"]
        assert len(added) == 4
        assert max(added) < min(e["t"] for e in events_of(tmp_path, "trial_result") if e["iteration"] == first)


class SlowlySaved(Stepper):
    """The better trial takes a second to save. The second iteration of the other trial ends in that second."""

    def step(self) -> dict[str, Any]:
        until(lambda: (self.x, self.at) != (1, 1) or os.path.exists(self.config["marker"]))
        return super().step()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        if self.x == 0:
            Path(self.config["marker"]).touch()
            time.sleep(1)
        super().save_checkpoint(checkpoint_dir)


def test_a_trial_is_exploited_while_it_still_saves(tmp_path: Path) -> None:
    space = {"x": tune.grid_search([0, 1]), "marker": str(tmp_path / "saves")}
    results, _ = run("fluid", tmp_path, population(), space, SlowlySaved, stop={"training_iteration": 3})
    assert [x for x, *_ in outcome(results)] == [0, 5]


def test_a_repeater_gets_its_repetitions(tmp_path: Path) -> None:
    repeated = Repeater(OptunaSearch(), repeat=2, set_index=False)
    space = {"x": tune.choice([1, 2])}
    results, _ = run("fluid", tmp_path, FIFOScheduler(), space, search_alg=repeated, num_samples=4)
    xs = [result.config["x"] for result in results]
    assert xs[0] == xs[1] and xs[2] == xs[3]


def test_another_time_attribute_decides_the_same_and_its_budgets_are_estimated(tmp_path: Path) -> None:
    def make() -> Any:
        return HyperBandScheduler(time_attr="at", max_t=6, reduction_factor=3)

    sides = [run(side, tmp_path, make(), max_concurrent_trials=1)[0] for side in ("stock", "fluid")]
    assert outcome(sides[1]) == outcome(sides[0])


def test_a_trial_that_hyperband_stops_while_it_is_paused_has_ended_in_the_log(tmp_path: Path) -> None:
    results, _ = run("fluid", tmp_path, HyperBandScheduler(max_t=9), stop={})
    last = {event["trial"]: event["ending"] for event in events_of(tmp_path, "trial_ended")}
    assert any(event["ending"] == "paused" for event in events_of(tmp_path, "trial_ended"))
    assert list(last.values()) == ["stopped"] * len(results)
    assert summarise(tmp_path / "fluid").endings == {"stopped": len(results)}
