"""What a script may use of Ray Tune besides an algorithm goes on working under FluidTune."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune import CheckpointConfig, FailureConfig, RunConfig, Stopper, TuneConfig
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, HyperBandScheduler

import fluidtune
from fluidtune import FluidScheduler
from fluidtune.report import EVENT_LOG_NAME
from tests.tune.running import CPUS, Recorder, fit, logged, outcome
from tests.tune.trainables import Stepper, raising, score, with_checkpoints, without_checkpoints

pytestmark = [pytest.mark.ray, pytest.mark.core, pytest.mark.usefixtures("ray2")]


class After(Stopper):
    """Stops a trial at its fourth result, and everything after 14 results."""

    def __init__(self) -> None:
        self.results = 0

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self.results += 1
        return result["training_iteration"] >= 4

    def stop_all(self) -> bool:
        return self.results >= 14


@pytest.mark.parametrize("stop", [{"score": 45.0}, After()], ids=["metric", "stopper"])
def test_stop_criteria(stop: Any, tmp_path: Path) -> None:
    recorder = Recorder()
    space = {"x": tune.grid_search([0, 1, 2]), "n": 30}
    results = fit("fluid", with_checkpoints, space, tmp_path, run={"stop": stop, "callbacks": [recorder]})
    if isinstance(stop, dict):
        expected = {x: next(i for i in range(1, 31) if score(x, i) >= 45 or i == 30) for x in range(3)}
    else:
        expected = dict.fromkeys(range(3), 4)
    assert {x: iterations[-1] for x, iterations in recorder.iterations().items()} == expected
    assert {x: iteration for x, iteration, _ in outcome(results)} == expected


def test_callbacks_and_loggers_of_trials_that_pause_and_resume(tmp_path: Path) -> None:
    recorder = Recorder()
    results = fit(
        "fluid",
        with_checkpoints,
        {"x": tune.grid_search(list(range(5)))},
        tmp_path,
        scheduler=HyperBandScheduler(max_t=9, reduction_factor=3),
        run={"callbacks": [recorder]},
    )
    starts = 0
    for result in results:
        last = result.metrics["training_iteration"]
        every = list(range(1, last + 1))
        assert logged(result) == every, "result.json"
        with open(os.path.join(result.path, "progress.csv")) as file:
            assert [int(row["training_iteration"]) for row in csv.DictReader(file)] == every, "progress.csv"
        assert list(result.metrics_dataframe["training_iteration"]) == every
        assert json.loads((Path(result.path) / "params.json").read_text())["x"] == result.config["x"]
        told = recorder.of(result.config["x"])
        assert told[0] == ("start", None) and told[-1] == ("complete", None)
        assert [iteration for what, iteration in told if what == "result"] == every
        assert told.count(("complete", None)) == 1
        starts += told.count(("start", None))
    assert starts > len(results), "no trial was paused and resumed, so this test has shown nothing"


class Exported(Stepper):
    """It trains for a while. Its model is a file, but for trial 2, which cannot be exported."""

    def step(self) -> dict[str, Any]:
        time.sleep(0.3 if self.config["x"] == 1 else 0.01)
        return super().step()

    def export_model(self, export_formats: Any, export_dir: Any = None) -> Any:
        if self.x == 2:
            raise RuntimeError("as ordered")
        Path(self.config["folder"], f"model-{self.config['x']}").write_text(str(self.iteration))
        return {}


class StopsOthers(FIFOScheduler):
    """The second result of trial 0 stops all others that run."""

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        if trial.config["x"] == 0 and result["training_iteration"] >= 2:
            for other in tune_controller.get_trials():
                if other is not trial and other.status == Trial.RUNNING:
                    tune_controller.stop_trial(other)
        return super().on_trial_result(tune_controller, trial, result)


def test_a_scheduler_may_stop_another_trial_whose_model_is_exported(tmp_path: Path) -> None:
    """Seen: the export failed (`KeyError: None`). A trial that cannot be exported fails alone."""
    analysis = fluidtune.run(
        Exported,
        config={"x": tune.grid_search([0, 1, 2]), "folder": str(tmp_path)},
        scheduler=StopsOthers(),
        stop={"training_iteration": 300},
        resources_per_trial={"cpu": 0.5},
        export_formats=["model"],
        raise_on_failed_trial=False,
        storage_path=str(tmp_path / "runs"),
        metric="score",
        mode="max",
        verbose=0,
        executor=CPUS,
    )
    assert [trial.status for trial in analysis.trials] == ["TERMINATED", "TERMINATED", "ERROR"]
    assert 0 < int((tmp_path / "model-1").read_text()) < 300 == int((tmp_path / "model-0").read_text())


def talking(config: dict[str, Any]) -> None:
    print(f"trial {config['x']} speaks")
    print(f"trial {config['x']} complains", file=sys.stderr)
    tune.report({"score": 1.0, "cwd": os.getcwd()})


def test_log_to_file_keeps_what_a_trial_prints_and_no_others(tmp_path: Path) -> None:
    results = fit("fluid", talking, {"x": tune.grid_search([0, 1, 2])}, tmp_path, run={"log_to_file": True})
    for result in results:
        x, place = result.config["x"], Path(result.metrics["cwd"])
        assert (place / "stdout").read_text().splitlines() == [f"trial {x} speaks"]
        assert (place / "stderr").read_text().splitlines() == [f"trial {x} complains"]


@pytest.mark.parametrize("max_failures", [0, 2])
def test_a_trial_that_raises_follows_the_failure_config(max_failures: int, tmp_path: Path) -> None:
    recorder = Recorder()
    space = {
        "x": tune.grid_search([0, 1]),
        "marker": tune.sample_from(lambda config: str(tmp_path / "marker") if config["x"] == 1 else None),
        "failures": 2,
    }
    run = {"failure_config": FailureConfig(max_failures=max_failures), "callbacks": [recorder]}
    results = fit("fluid", raising, space, tmp_path, run=run, fails=0 if max_failures else 1)
    good, bad = (next(r for r in results if r.config["x"] == x) for x in (0, 1))
    assert good.error is None and good.metrics["training_iteration"] == 5
    if max_failures == 2:
        assert recorder.iterations()[1] == [1, 2, 3, 4, 5], "an iteration was lost or came twice"
    else:
        assert "as ordered" in str(bad.error)
        assert (Path(bad.path) / "error.txt").exists()
        assert recorder.of(1)[-1] == ("error", None)


def failing_once(config: dict[str, Any]) -> None:
    """Fails once at its fourth iteration. ``x`` is the distance of the numbers that it reports; 0: it reports none."""
    for iteration in range(1, 7):
        marker = Path(config["folder"], f"failed-{config['x']}")
        if iteration == 4 and not marker.exists():
            marker.touch()
            raise RuntimeError("as ordered")
        number = {"training_iteration": config["x"] * iteration} if config["x"] else {}
        tune.report({"score": 1.0, "at": iteration, **number})


def test_a_retry_reports_what_it_runs_again_and_the_users_numbers_decide_nothing(tmp_path: Path) -> None:
    """Under stock Tune both trials report these numbers."""
    recorder = Recorder()
    run = {"failure_config": FailureConfig(max_failures=1), "callbacks": [recorder]}
    space = {"x": tune.grid_search([0, 100]), "folder": str(tmp_path)}
    results = fit("fluid", failing_once, space, tmp_path, run=run)
    assert recorder.iterations()[0] == [1, 2, 3, 1, 2, 3, 4, 5, 6]
    assert recorder.iterations()[100] == [100, 200, 300, 100, 200, 300, 400, 500, 600]
    assert [r.metrics["at"] for r in results] == [6, 6]
    assert [len(logged(r)) for r in results] == [9, 9]


def test_the_status_line_shows_under_the_output_that_users_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_AIR_NEW_OUTPUT", raising=False)
    monkeypatch.chdir(tmp_path)
    fit("fluid", without_checkpoints, {"x": tune.grid_search([0, 1, 2]), "n": 2}, tmp_path, run={"verbose": 1})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FluidTune: ")]
    assert len(lines) >= 2, "one at the start, one at the end"
    assert lines[0].endswith(" waiting") and "cpu devices busy" in lines[0]
    assert "0 trials on them (0 on several), 0 waiting" in lines[-1]


def test_fail_fast_stops_the_others(tmp_path: Path) -> None:
    space = {"x": tune.grid_search([0, 1, 2, 3]), "marker": str(tmp_path / "m"), "failures": 1, "n": 2000}
    run = {"failure_config": FailureConfig(fail_fast=True)}
    results = fit("fluid", raising, space, tmp_path, run=run, fails=1)
    assert all((r.metrics or {}).get("training_iteration", 0) < 2000 for r in results)


def test_checkpoints_and_their_retention(tmp_path: Path) -> None:
    keep = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score", checkpoint_score_order="max")
    (result,) = fit("fluid", with_checkpoints, {"x": 3, "n": 6}, tmp_path, run={"checkpoint_config": keep})
    assert len(result.best_checkpoints) == 2
    assert sorted(os.path.basename(p) for p in Path(result.path).glob("checkpoint_*")) == sorted(
        os.path.basename(c.path) for c, _ in result.best_checkpoints
    )
    with result.checkpoint.as_directory() as directory:
        assert json.loads((Path(directory) / "at.json").read_text()) == 6
    # What we keep for ourselves is gone when the trial has ended.
    assert not list(Path(result.path).glob(".fluid*"))


def test_a_class_is_checkpointed_as_often_as_asked_and_at_its_end(tmp_path: Path) -> None:
    often = CheckpointConfig(checkpoint_frequency=2, checkpoint_at_end=True)
    (result,) = fit("fluid", Stepper, {"x": 3, "n": 5}, tmp_path, run={"checkpoint_config": often})
    kept = []
    for checkpoint in sorted(Path(result.path).glob("checkpoint_*")):
        kept.append(json.loads((checkpoint / "at.json").read_text()))
    assert kept == [2, 4, 5]
    assert logged(result) == [1, 2, 3, 4, 5]


@pytest.mark.timeout(120)
def test_time_budget(tmp_path: Path) -> None:
    space = {"x": tune.grid_search([0, 1, 2, 3]), "n": 100000}
    results = fit("fluid", without_checkpoints, space, tmp_path, time_budget_s=4)
    assert len(results) == 4
    assert all((r.metrics or {}).get("training_iteration", 0) < 100000 for r in results)


@pytest.mark.usefixtures("kept_parameters")
def test_a_fluid_scheduler_in_a_stock_tuner(tmp_path: Path) -> None:
    tuner = tune.Tuner(
        tune.with_parameters(with_large, table=list(range(1000))),
        param_space={"x": tune.grid_search([0, 1, 2])},
        tune_config=TuneConfig(
            metric="score", mode="max", scheduler=FluidScheduler(ASHAScheduler(max_t=4), CPUS), max_concurrent_trials=2
        ),
        run_config=RunConfig(name="job", storage_path=str(tmp_path), verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    assert (tmp_path / "job" / EVENT_LOG_NAME).exists()
    assert {r.metrics["sum"] for r in results} == {499500}


def with_large(config: dict[str, Any], table: list[int]) -> None:
    for iteration in range(1, 5):
        tune.report({"score": score(config["x"], iteration), "sum": sum(table)})


class Counting(tune.search.Searcher):
    """Suggests x = 0, 1, 2, ... and notes which of them completed."""

    def __init__(self) -> None:
        super().__init__(metric="score", mode="max")
        self.suggested: dict[str, int] = {}
        self.completed: list[int] = []
        self.most = 0

    def set_search_properties(self, metric: Any, mode: Any, config: Any, **spec: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        self.suggested[trial_id] = len(self.suggested)
        self.most = max(self.most, len(self.suggested) - len(self.completed))
        return {"x": self.suggested[trial_id], "n": 3}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        assert result is not None and result["training_iteration"] == 3
        self.completed.append(self.suggested[trial_id])


def test_a_searcher_is_asked_and_told(tmp_path: Path) -> None:
    searcher = Counting()
    limited = tune.search.ConcurrencyLimiter(searcher, max_concurrent=2)
    fit("fluid", without_checkpoints, {}, tmp_path, search_alg=limited, num_samples=5, metric="score", mode="max")
    assert sorted(searcher.completed) == [0, 1, 2, 3, 4]
    assert searcher.most == 2
