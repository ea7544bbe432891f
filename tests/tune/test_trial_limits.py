"""Limits of time for a trial: it ends, its error says where it stood, and others get its device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from fluidtune import FluidExecutor
from fluidtune.tune.trial_limits import TrialLimits
from tests.tune.running import fit


def test_time_on_devices_counts_and_silence_counts() -> None:
    limits = TrialLimits(10.0, 3.0)
    assert limits.passed(0.0, ["a"], {"a": 0.0}) == {}
    assert limits.passed(3.0, ["a"], {"a": 0.0}) == {}
    assert "stall_timeout_s=3" in limits.passed(3.5, ["a"], {"a": 0.0})["a"]
    assert limits.passed(9.0, ["b"], {}) == {}, "what holds no device grows no older"
    assert limits.passed(15.0, ["a"], {"a": 14.0}) == {}
    assert "trial_timeout_s=10" in limits.passed(20.0, ["a"], {"a": 19.0})["a"]
    limits.forget("a")
    assert limits.passed(21.0, ["a"], {"a": 20.5}) == {}


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
