"""A search that has ended goes on as one that had not."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from ray import tune
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler
from ray.tune.search.optuna import OptunaSearch

import fluidtune
from fluidtune import driver_lock
from fluidtune.cli import cli
from fluidtune.tune import extension
from fluidtune.tune.extension import Extension, come_to_limit, lies_within
from tests.tune.running import events_of, fit, logged
from tests.tune.test_bad_input import refused
from tests.tune.test_driver_lock import driven
from tests.tune.trainables import raising, with_checkpoints

ONE = fluidtune.FluidExecutor(devices="cpu:1", max_packing=1)
SPACE = {"x": tune.uniform(0, 1), "n": 3, "deep": {"k": tune.choice([1, 2])}, "g": tune.grid_search(["a", "b"])}


def test_which_trials_train_on_and_which_lie_within_a_space() -> None:
    for last, limits, until, expected in (
        ({"i": 8}, {"i": 8}, {"i": 20}, True),
        ({"i": 9}, {"i": 8, "loss": 3}, {"i": 20}, True),
        ({"i": 7}, {"i": 8}, {"i": 20}, False),  # it was stopped
        ({"i": 20}, {"i": 8}, {"i": 20}, False),
        ({"i": 8}, {}, {"i": 20}, False),  # it ended by itself
        ({"i": 8, "t": 30}, {"i": 8, "t": 60}, {"i": 20, "t": 25}, False),
        ({}, {"i": 8}, {"i": 20}, False),
    ):
        assert come_to_limit(last, limits, until) is expected
    whole = {"x": 0.5, "n": 3, "deep": {"k": 2}, "g": "b"}
    assert lies_within(whole, SPACE) and lies_within(whole, {**SPACE, "n": object()})
    for other in ({"x": 2.0}, {"x": "half"}, {"n": 4}, {"deep": {"k": 3}}, {"deep": 1}, {"g": "c"}, {"more": 1}):
        assert not lies_within({**whole, **other}, SPACE)


def test_storage_that_does_not_keep_what_is_asked_for_ends_the_continuation_in_a_line() -> None:
    gone = SimpleNamespace(checkpoint=Mock(side_effect=OSError("no route to host")))
    refused(lambda: Extension(frozenset(), frozenset(), 1, {}, None, None).keep(gone), "no route to host", "ask again")


@pytest.mark.ray
@pytest.mark.core
@pytest.mark.usefixtures("ray2")
def test_27_trials_and_27_more_are_the_search_of_54(tmp_path: Path) -> None:
    def searched(path: Path, samples: int) -> Any:
        np.random.seed(3)
        asha = ASHAScheduler(max_t=9, reduction_factor=2)
        one = {"max_concurrent_trials": 1, "reuse_actors": True, "scheduler": asha}
        space = {"x": tune.uniform(0, 50), "pause": 0.0, "of": tune.choice([len, max])}
        return fit("fluid", with_checkpoints, space, path, executor=ONE, num_samples=samples, **one)

    def decisions(results: Any) -> list[tuple[Any, ...]]:
        ordered = sorted(results, key=lambda result: result.metrics["trial_id"])
        return [(one.config["x"], one.config["of"], one.metrics["training_iteration"]) for one in ordered]

    whole, half = decisions(searched(tmp_path / "54", 54)), decisions(searched(tmp_path / "27", 27))
    assert half == whole[:27] and len({end for *_, end in whole}) > 2, "ASHA stops none early"
    np.random.seed(3)  # as the script that is run again does
    path = str(tmp_path / "27" / "fluid")
    extended = fluidtune.Tuner.extend(path, num_samples=27).fit()
    assert decisions(extended) == whole
    best = extended.get_best_result("score", "max").metrics["trial_id"]
    # Seen: the best of the trials of the last driver.
    assert events_of(tmp_path / "27", "run_ended")[-1]["best"]["trial"] == best
    assert decisions(tune.Tuner.restore(path, with_checkpoints).fit()) == whole


@pytest.mark.ray
@pytest.mark.core
@pytest.mark.usefixtures("ray2")
def test_the_command_trains_finished_trials_on_and_refuses_what_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asha = ASHAScheduler(max_t=4, grace_period=2, reduction_factor=2)
    space = {"x": tune.grid_search([3, 4, 1]), "pause": 0.0}
    fit("fluid", with_checkpoints, space, tmp_path, executor=ONE, max_concurrent_trials=1, scheduler=asha)
    path = str(tmp_path / "fluid")
    monkeypatch.setattr(sys, "argv", ["fluidtune"])
    killed = tmp_path / "killed" / "fluid"  # the run as a kill at the line that says what follows would leave it
    with monkeypatch.context() as once:
        once.setattr(extension.logger, "warning", lambda *said: shutil.copytree(path, killed))
        cli(["continue", path, "--until", "training_iteration=8", "--samples", "1"], standalone_mode=False)
    cli(["continue", str(killed), "--samples", "1"], standalone_mode=False)
    results = fluidtune.Tuner.restore(path, with_checkpoints).fit()
    ends = sorted((one.config["x"], one.metrics["training_iteration"], one.metrics["began"]) for one in results)
    assert [(x, end) for x, end, _ in ends if end > 4] and len(ends) == 6
    for one in results:
        assert logged(one) == list(range(1, one.metrics["training_iteration"] + 1)), "reported twice, or not at all"
    assert any(began == 4 and end == 8 for _, end, began in ends), "none went on from its checkpoint"
    assert max(end for _, end, _ in ends) == 8
    # Seen: killed in its first seconds, a continuation that had said "4 of 4 trials train on" was forgotten.
    again = fluidtune.Tuner.restore(str(killed), with_checkpoints).fit()
    reached = [one.metrics["training_iteration"] for one in again]
    assert len(reached) == 9 and reached.count(8) >= 2, "another continuation came between"

    def extend(*given: Any, **asked: Any) -> Any:
        return lambda: fluidtune.Tuner.extend(*given, **asked)

    refused(extend(str(tmp_path / "none"), num_samples=1), "none", "no run's directory")
    refused(extend(path), "num_samples", "--until")
    refused(extend(path, param_space=space), "num_samples")
    refused(extend(path, raising, num_samples=1), "raising", "with_checkpoints")
    for samples in (0, -1, 1.5, True):
        refused(extend(path, num_samples=samples), f"num_samples={samples!r}", "above 0")
    for limit in (8, 4, float("nan"), float("inf"), "9"):
        refused(extend(path, until={"training_iteration": limit}), f"{limit!r}", "above the limit of before, 8")
    refused(extend(path, until={"loss": 1}), "loss", "ends by itself")
    refused(lambda: cli(["continue", path, "--until", "9"], standalone_mode=False), "--until 9", "NAME=NUMBER")
    state = max(Path(path).glob("experiment_state-*.json"))
    saved = json.loads(state.read_text())
    state.write_text(state.read_text()[:-100])
    refused(extend(path, num_samples=1), "no run's directory")
    saved["runner_data"]["_fluidtune_search"]["ray"] = "1.0"
    state.write_text(json.dumps(saved))
    refused(extend(path, num_samples=1), "Ray 1.0")
    before = {file.name: file.read_bytes() for file in Path(path).iterdir() if file.is_file()}
    monkeypatch.setattr(driver_lock, "PATIENCE_S", 0.1)
    with driven(Path(path)) as (pid, _):
        same_name = lambda: fit("fluid", with_checkpoints, space, tmp_path, executor=ONE)  # noqa: E731
        resumed = lambda: fluidtune.run(with_checkpoints, name="fluid", storage_path=str(tmp_path), resume=True)  # noqa: E731
        ours = (extend(path, num_samples=1), fluidtune.Tuner.restore(path, with_checkpoints).fit, same_name, resumed)
        for second in ours:
            refused(second, f"process {pid} on ", "wait for its end")
    assert before.items() <= {file.name: file.read_bytes() for file in Path(path).iterdir() if file.is_file()}.items()


@pytest.mark.ray
@pytest.mark.usefixtures("ray2")
def test_a_searcher_is_told_of_the_trials_within_a_new_space(tmp_path: Path, caplog: Any) -> None:
    searcher, space = OptunaSearch(seed=4), {"x": tune.uniform(0, 1), "n": 2, "pause": 0.0}
    first = fit("fluid", with_checkpoints, space, tmp_path, executor=ONE, num_samples=4, search_alg=searcher)
    within = sum(one.config["x"] <= 0.9 for one in first)
    path, other = str(tmp_path / "fluid"), {**space, "x": tune.uniform(0, 0.9)}
    found = fluidtune.Tuner.extend(path, num_samples=2, param_space=other).fit()
    said = (
        f"{within} of 4 trials lie within the new space; the scheduler compares with all; OptunaSearch knows {within}"
    )
    assert said in caplog.text and 0 < within < 4
    assert len(found) == 6 and sum(one.config["x"] <= 0.9 for one in found) == within + 2
    hyperband = HyperBandScheduler(max_t=4, reduction_factor=2)
    fit("fluid", with_checkpoints, space, tmp_path / "hyperband", executor=ONE, num_samples=3, scheduler=hyperband)
    path = str(tmp_path / "hyperband" / "fluid")
    refused(lambda: fluidtune.Tuner.extend(path, until={"training_iteration": 9}), "HyperBandScheduler", "max_t")
    assert len(fluidtune.Tuner.extend(path, num_samples=2).fit()) == 5
