"""A trial that stops reporting is named once, and keeps its devices. One that passes a limit of the user's is ended."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.util.placement_group import placement_group

from fluidtune import FluidExecutor
from fluidtune.tune import stall_detector
from fluidtune.tune.stall_detector import FIRST_S, LEAST_S, TIMES, SilentTrial, StallDetector
from tests.conftest import placement_groups
from tests.tune.running import events_of, fit


def test_only_what_is_much_longer_than_before_is_named_and_once():
    watch = StallDetector()
    watch.iteration_asked("a", 0.0)
    watch.iteration_done("a", 20.0)
    watch.iteration_asked("a", 20.0)
    assert watch.newly_silent(20.0 + TIMES * 20.0) == []
    assert watch.newly_silent(300.0) == [SilentTrial("a", 280.0, 20.0)]
    assert watch.newly_silent(900.0) == [] and list(watch.silent) == ["a"]
    watch.iteration_done("a", 880.0)
    assert not watch.silent
    watch.iteration_asked("a", 900.0)
    assert watch.newly_silent(900.0 + TIMES * 880.0) == [], "it is known to take that long"


def test_a_trial_without_history_is_measured_by_the_others():
    watch = StallDetector()
    watch.iteration_asked("a", 0.0)
    assert watch.newly_silent(FIRST_S) == []
    watch.iteration_asked("b", 0.0)
    watch.iteration_done("b", 0.1)
    assert watch.newly_silent(LEAST_S) == []
    assert watch.newly_silent(LEAST_S + 1) == [SilentTrial("a", LEAST_S + 1, 0.1)]
    watch.stop_watching("a")
    assert watch.newly_silent(1e9) == [] and not watch.silent


def asking(config: dict[str, Any]) -> None:
    placement_group([{"CPU": 100}]).wait(4.0)
    tune.report({"score": 0})


@pytest.mark.ray
@pytest.mark.newest
@pytest.mark.usefixtures("ray2")
def test_what_a_silent_trial_waits_for_in_ray_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stall_detector, "FIRST_S", 2.0)
    with caplog.at_level(logging.WARNING, "fluidtune"):
        fit("fluid", asking, {}, tmp_path)
    assert "wait for [{'CPU': 100.0}]: let fewer trials run at a time" in caplog.text
    (said,) = events_of(tmp_path, "trial_silent")
    assert f"trial {said['trial']} has not reported for" in caplog.text
    assert not placement_groups()


def test_time_on_devices_counts_and_silence_counts() -> None:
    limits = StallDetector(10.0, 3.0)
    limits.iteration_asked("a", 0.0)
    assert limits.passed(0.0, ["a"]) == limits.passed(3.0, ["a"]) == {}
    assert "stall_timeout_s=3" in limits.passed(3.5, ["a"])["a"]
    assert limits.passed(9.0, ["b"]) == {}, "what holds no device grows no older"
    limits.iteration_asked("a", 14.0)
    assert limits.passed(15.0, ["a"]) == {}
    limits.iteration_asked("a", 19.0)
    assert "trial_timeout_s=10" in limits.passed(20.0, ["a"])["a"]
    limits.forget("a")
    assert limits.passed(21.0, ["a"]) == {}


def sleeping(config: dict[str, Any]) -> None:
    if config["x"] == 0 and config["when"] == "first":
        while_it_sleeps_for_ever()
    for count in range(3):
        tune.report({"score": count})
        if config["x"] == 0:
            while_it_sleeps_for_ever()


def while_it_sleeps_for_ever() -> None:
    time.sleep(3600)


@pytest.mark.ray
@pytest.mark.usefixtures("ray2")
@pytest.mark.parametrize(
    ("when", "limit"), [("first", "trial_timeout_s"), pytest.param("later", "stall_timeout_s", marks=pytest.mark.core)]
)
def test_a_trial_that_sleeps_for_ever_is_ended(when: str, limit: str, tmp_path: Path) -> None:
    executor, space = FluidExecutor(devices="cpu:1", **{limit: 3.0}), {"x": tune.grid_search([0, 1, 2]), "when": when}
    results = fit("fluid", sleeping, space, tmp_path, executor=executor, fails=1)
    [error] = results.errors
    assert "while_it_sleeps_for_ever" in str(error) and f"{limit}=3" in str(error)
    assert [len(each.metrics_dataframe) for each in results if each.error is None] == [3, 3]
