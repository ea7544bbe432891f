"""Trials of Hugging Face's Trainer in real workers: resized at random moments, or killed, they report what stock does.

Needs Transformers and Accelerate: ``make test-frameworks``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fluidtune.report import EVENT_LOG_NAME, read_events
from tests.integrations.on_ray import (
    ROOT,
    OnRay,
    assert_example_runs_both_ways,
    assert_three_lines_changed,
    run_both_ways,
)

pytestmark = [pytest.mark.transformers, pytest.mark.ray]

METRICS = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step")
TRIALS = OnRay("transformers_trials", METRICS, "eval_loss", 1e-4)


def test_a_trial_that_is_resized_at_random_reports_what_stock_does(
    ray2: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, widths = TRIALS.resized_at_random(monkeypatch, tmp_path, epochs=40, step=0.1)
    assert 1 in widths and 2 in widths, widths
    assert (Path(result.checkpoint.path) / "checkpoint" / "model.safetensors").is_file()


@pytest.mark.faults
@pytest.mark.parametrize("leader", [True, False])
def test_a_killed_worker_costs_no_epoch_and_repeats_none(ray2: None, tmp_path: Path, leader: bool) -> None:
    TRIALS.loses_a_worker(tmp_path, 30, 0.15, 20, leader)


def test_three_lines_of_the_example_are_changed() -> None:
    assert_three_lines_changed("digits_transformers.py", r"fluidtune\.|prepare_trainer|ReportCallback")


def test_the_example_runs_both_ways(no_ray: None, tmp_path: Path) -> None:
    assert_example_runs_both_ways("digits_transformers.py", tmp_path, 0.02)


def test_a_hyperparameter_search_runs_both_ways_and_its_trials_grow(no_ray: None, tmp_path: Path) -> None:
    """`Trainer.hyperparameter_search(backend="ray")` of a prepared Trainer, which is sent to the workers."""
    script = [str(ROOT / "tests" / "integrations" / "transformers_search.py")]
    found = run_both_ways(script, lambda name: [str(tmp_path / name)], r"objectives (.*)", 280)
    stock, ours = ([float(value) for value in line.split()] for line in found)
    assert ours == pytest.approx(stock, rel=1e-4)
    events = list(read_events(tmp_path / "ours" / "search" / EVENT_LOG_NAME))
    assert 2 in [len(e["devices"]) for e in events if e["event"] == "resized"]
    assert not [e for e in events if e["event"] in ("worker_lost", "growth_ended")]
