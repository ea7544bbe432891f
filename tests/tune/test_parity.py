"""The same script gives the same trials, stops, promotions and metrics under stock Ray Tune and FluidTune."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler
from ray.tune.search import Searcher

from tests.tune.running import Recorder, fit, outcome
from tests.tune.trainables import Stepper, with_checkpoints, without_checkpoints

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray2")]

XS = list(range(9))


def both(path: Path, trainable: Any, make: Any, **config: Any) -> tuple[Any, Any, Recorder, Recorder]:
    sides = []
    for side in ("stock", "fluid"):
        recorder = Recorder()
        results = fit(
            side,
            trainable,
            {"x": tune.grid_search(XS)},
            path,
            scheduler=make(),
            run={"callbacks": [recorder]},
            **config,
        )
        sides.append((results, recorder))
    return sides[0][0], sides[1][0], sides[0][1], sides[1][1]


def checkpoints(results: Any) -> list[list[tuple[Any, ...]]]:
    """What is known of every trial's checkpoints: their contents' iteration, and the metrics that belong to them."""
    found = []
    for result in results:
        found.append([])
        for checkpoint, metrics in result.best_checkpoints:
            with checkpoint.as_directory() as directory:
                at = json.loads((Path(directory) / "at.json").read_text())
            found[-1].append((at, sorted(metrics), metrics["training_iteration"], metrics["score"]))
    return found


def hyperband() -> HyperBandScheduler:
    return HyperBandScheduler(max_t=9, reduction_factor=3)


@pytest.mark.core
@pytest.mark.parametrize("trainable", [with_checkpoints, Stepper], ids=["function", "class"])
def test_hyperband_stops_and_promotes_the_same_trials_at_the_same_iterations(trainable: Any, tmp_path: Path) -> None:
    stock, fluid, told_stock, told_fluid = both(tmp_path, trainable, hyperband)
    assert outcome(fluid, "at") == outcome(stock, "at")
    assert told_fluid.iterations() == told_stock.iterations()
    # The test would be empty if HyperBand had neither stopped nor promoted.
    lengths = [iteration for _, iteration, *_ in outcome(fluid)]
    assert len(set(lengths)) > 1
    # The last of a rung to report is stopped, or goes on, without the pause in which the others are saved.
    compared = 0
    for ours, theirs in zip(checkpoints(fluid), checkpoints(stock), strict=True):
        numbers, others = {at for at, *_ in ours}, {at for at, *_ in theirs}
        assert numbers ^ others <= set(lengths)
        assert [one for one in ours if one[0] in others] == [one for one in theirs if one[0] in numbers]
        compared += len(numbers & others)
    assert compared >= len(XS)
    for x, iterations in told_fluid.iterations().items():
        assert iterations == list(range(1, len(iterations) + 1)), f"trial x={x} lost or repeated an iteration"
    # The last of a rung to report goes on without a pause, and which one that is depends on the order of execution:
    # starts may differ, nothing else.
    for x in XS:
        fluid_heard, stock_heard = ([e for e in told.of(x) if e[0] != "start"] for told in (told_fluid, told_stock))
        assert fluid_heard == stock_heard


class Ascending(Searcher):
    """Trials x = 0, 1, 2, ... when Tune asks."""

    asked = -1

    def suggest(self, trial_id: str) -> dict[str, Any]:
        self.asked += 1
        return {"x": self.asked}

    def on_trial_complete(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_brackets_are_filled_before_they_are_halved_though_trials_come_one_by_one(tmp_path: Path) -> None:
    """A bracket is halved when all trials that it has are there, and this one's rungs take milliseconds."""
    # A whole band: nine trials, five and three.
    at_once = fit("fluid", Stepper, {"x": tune.grid_search(list(range(17)))}, tmp_path / "a", scheduler=hyperband())
    alone = {"search_alg": Ascending("score", "max"), "num_samples": 17, "scheduler": hyperband()}
    one_by_one = fit("fluid", Stepper, {}, tmp_path / "b", **alone)
    assert sorted(outcome(one_by_one)) == sorted(outcome(at_once))


class SlowToSave(Stepper):
    def save_checkpoint(self, checkpoint_dir: str) -> None:
        time.sleep(0.5)
        super().save_checkpoint(checkpoint_dir)


@pytest.mark.core
def test_a_trial_that_saves_while_its_bracket_ends_is_not_left_paused(tmp_path: Path) -> None:
    results = fit("fluid", SlowToSave, {"x": tune.grid_search([0, 1])}, tmp_path, scheduler=hyperband())
    assert [iteration for _, iteration, *_ in outcome(results)] == [9, 9]


class LastToFail(Stepper):
    """Trial 16 fails in its second rung, after the two others have come to that rung's end."""

    def step(self) -> dict[str, Any]:
        found = super().step()
        if self.x == 16 and self.at == 3:
            time.sleep(2)
            raise RuntimeError("as ordered")
        return {**found, "score": self.x + self.at}


def test_a_rung_goes_on_when_the_last_trial_that_it_waits_for_fails(tmp_path: Path) -> None:
    # A whole band; the nine trials of its last bracket train 1, 3 and 9 iterations. Seen: the search never ended.
    space = {"x": tune.grid_search(list(range(17)))}
    results = fit("fluid", LastToFail, space, tmp_path, scheduler=hyperband(), fails=1)
    lengths = {found.config["x"]: (found.metrics or {})["training_iteration"] for found in results}
    assert [lengths[x] for x in range(8, 17)] == [1, 1, 1, 1, 1, 1, 3, 9, 2]


def test_hyperband_without_checkpoints_decides_the_same_and_repeats_nothing(tmp_path: Path) -> None:
    """A function that saves nothing begins again when HyperBand resumes it.

    Stock Tune then hears its first iterations a second time; FluidTune runs them again and reports them once.
    """
    stock, fluid, told_stock, told_fluid = both(tmp_path, without_checkpoints, hyperband)
    assert outcome(fluid, "at") == outcome(stock, "at")
    for x, iterations in told_fluid.iterations().items():
        assert iterations == list(range(1, len(iterations) + 1))
        assert iterations[-1] == told_stock.iterations()[x][-1]
    repeated = [its for its in told_stock.iterations().values() if len(its) != len(set(its))]
    assert repeated, "nothing was resumed, so this test has shown nothing"


def asha() -> ASHAScheduler:
    return ASHAScheduler(max_t=9, grace_period=1, reduction_factor=3)


@pytest.mark.core
def test_asha_one_at_a_time_is_the_same(tmp_path: Path) -> None:
    stock, fluid, told_stock, told_fluid = both(tmp_path, with_checkpoints, asha, max_concurrent_trials=1)
    assert outcome(fluid, "at") == outcome(stock, "at")
    assert told_fluid.heard == told_stock.heard
    assert len({iteration for _, iteration, *_ in outcome(fluid)}) > 1


@pytest.mark.core
def test_as_many_trials_run_at_once_as_the_script_says(tmp_path: Path) -> None:
    """Whether each decision follows ASHA's rule: tests/faults/test_search.py, "several"."""
    recorder, space = Recorder(), {"x": tune.grid_search(list(range(12))), "pause": 0.2}
    run = {"callbacks": [recorder]}
    results = fit("fluid", with_checkpoints, space, tmp_path, scheduler=asha(), max_concurrent_trials=2, run=run)
    assert {x: it for x, it, *_ in outcome(results)} == {x: its[-1] for x, its in recorder.iterations().items()}
    running, most = set[Any](), 0
    for what, x, _ in recorder.heard:
        if what == "start":
            running.add(x)
        elif what in ("complete", "error"):
            running.discard(x)
        most = max(most, len(running))
    assert most == 2


@pytest.mark.core
def test_grid_and_random_give_the_same_results_in_the_same_order(tmp_path: Path) -> None:
    grids = []
    for side in ("stock", "fluid"):
        grids.append(
            fit(
                side,
                without_checkpoints,
                {"x": tune.grid_search([3, 1, 2]), "y": tune.uniform(0, 1), "n": tune.choice([2, 3, 4])},
                tmp_path,
                num_samples=2,
                search_alg=tune.search.BasicVariantGenerator(random_state=7),
            )
        )
    assert [r.config for r in grids[1]] == [r.config for r in grids[0]]
    assert outcome(grids[1], "at") == outcome(grids[0], "at")
    stock, fluid = (g.get_dataframe() for g in grids)
    assert sorted(fluid.columns) == sorted(stock.columns)
    assert list(fluid["score"]) == list(stock["score"])
    assert grids[1].get_best_result().config == grids[0].get_best_result().config
