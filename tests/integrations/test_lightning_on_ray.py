"""Lightning trials in real workers: resized at random moments, or killed, they report what one undisturbed would.

Needs Lightning: ``make test-frameworks``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fluidtune.tune import tuning_job
from tests.integrations.on_ray import ROOT, OnRay, assert_three_lines_changed, run_both_ways
from tests.tune.test_elastic import Restless

pytestmark = [pytest.mark.lightning, pytest.mark.ray]


def searched() -> Any:
    from . import lightning_trials

    return lightning_trials.searched


METRICS = ("train_epoch", "train_step", "last", "samples", "largest", "val", "mean_of_val", "epoch", "step")
TRIALS = OnRay(searched, METRICS, "val", 1e-5)


def test_a_trial_that_is_resized_at_random_reports_what_stock_does(
    ray2: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = TRIALS.expected(tmp_path, 60)
    monkeypatch.setattr(tuning_job, "Engine", Restless)
    result, events = TRIALS.grown(tmp_path, epochs=60, step=0.01)
    TRIALS.assert_same(result, alone)
    widths = [len(e["devices"]) for e in events if e["event"] == "resized"]
    assert widths.count(2) >= 2 and widths.count(1) >= 2, widths
    assert not [e for e in events if e["event"] in ("worker_lost", "growth_ended")]
    assert (Path(result.checkpoint.path) / "checkpoint.ckpt").is_file()


@pytest.mark.faults
@pytest.mark.parametrize("leader", [True, False])
def test_a_killed_worker_costs_no_epoch_and_repeats_none(ray2: None, tmp_path: Path, leader: bool) -> None:
    alone = TRIALS.expected(tmp_path, 30)
    result, events = TRIALS.grown(tmp_path, epochs=30, step=0.02, dies=(8, leader, str(tmp_path / "died")))
    TRIALS.assert_same(result, alone)
    assert (tmp_path / "died").exists(), "the trial never grew"
    assert not [e for e in events if e["event"] == "growth_ended"]
    assert [e for e in events if e["event"] == "worker_lost"]


def test_three_lines_of_the_example_are_changed() -> None:
    assert_three_lines_changed("digits_lightning.py", r"fluidtune\.|ElasticStrategy|ReportCallback")


def test_the_example_runs_both_ways(no_ray: None, tmp_path: Path) -> None:
    script = [str(ROOT / "examples" / "digits_lightning.py"), "--samples", "2", "--epochs", "2"]
    stock, ours = run_both_ways(script, lambda name: ["--storage", str(tmp_path / name)], r"best accuracy (\S+)", 240)
    assert float(stock) == pytest.approx(float(ours), abs=0.01), (stock, ours)
