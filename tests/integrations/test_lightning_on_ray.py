"""Lightning trials in real workers: resized at random moments, or killed, they report what one undisturbed would.

Needs Lightning: ``make test-frameworks``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.on_ray import OnRay, assert_example_runs_both_ways, assert_three_lines_changed

pytestmark = [pytest.mark.lightning, pytest.mark.ray]

METRICS = ("train_epoch", "train_step", "last", "samples", "largest", "val", "mean_of_val", "epoch", "step")
TRIALS = OnRay("lightning_trials", METRICS, "val", 1e-5)


def test_a_trial_that_is_resized_at_random_reports_what_stock_does(
    ray2: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, widths = TRIALS.resized_at_random(monkeypatch, tmp_path, epochs=60, step=0.01)
    assert widths.count(2) >= 2 and widths.count(1) >= 2, widths
    assert (Path(result.checkpoint.path) / "checkpoint.ckpt").is_file()


@pytest.mark.faults
@pytest.mark.parametrize("leader", [True, False])
def test_a_killed_worker_costs_no_epoch_and_repeats_none(ray2: None, tmp_path: Path, leader: bool) -> None:
    TRIALS.loses_a_worker(tmp_path, 30, 0.02, 8, leader)


def test_three_lines_of_the_example_are_changed() -> None:
    assert_three_lines_changed("digits_lightning.py", r"fluidtune\.|ElasticStrategy|ReportCallback")


def test_the_example_runs_both_ways(no_ray: None, tmp_path: Path) -> None:
    assert_example_runs_both_ways("digits_lightning.py", tmp_path, 0.01)
