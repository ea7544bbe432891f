"""Trials of Hugging Face's Trainer in real workers: resized at random moments, or killed, they report what stock does.

Needs Transformers and Accelerate: ``make test-frameworks``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fluidtune.report import EVENT_LOG_NAME, read_events
from fluidtune.tune import tuning_job
from tests.integrations.on_ray import ROOT, OnRay, assert_three_lines_changed, run_both_ways
from tests.tune.test_elastic import Restless

pytestmark = [pytest.mark.transformers, pytest.mark.ray]


def searched() -> Any:
    from . import transformers_trials

    return transformers_trials.searched


METRICS = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step")
TRIALS = OnRay(searched, METRICS, "eval_loss", 1e-4)


def test_a_trial_that_is_resized_at_random_reports_what_stock_does(
    ray2: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = TRIALS.expected(tmp_path, 40)
    monkeypatch.setattr(tuning_job, "Engine", Restless)
    result, events = TRIALS.grown(tmp_path, epochs=40, step=0.1)
    TRIALS.assert_same(result, alone)
    widths = [len(e["devices"]) for e in events if e["event"] == "resized"]
    assert 1 in widths and 2 in widths, widths
    assert not [e for e in events if e["event"] in ("worker_lost", "growth_ended")]
    assert (Path(result.checkpoint.path) / "checkpoint" / "model.safetensors").is_file()


@pytest.mark.faults
@pytest.mark.parametrize("leader", [True, False])
def test_a_killed_worker_costs_no_epoch_and_repeats_none(ray2: None, tmp_path: Path, leader: bool) -> None:
    alone = TRIALS.expected(tmp_path, 30)
    result, events = TRIALS.grown(tmp_path, epochs=30, step=0.15, dies=(20, leader, str(tmp_path / "died")))
    TRIALS.assert_same(result, alone)
    assert (tmp_path / "died").exists(), "the trial never grew"
    assert [e for e in events if e["event"] == "worker_lost"]
    assert not [e for e in events if e["event"] == "growth_ended"]


def test_three_lines_of_the_example_are_changed() -> None:
    assert_three_lines_changed("digits_transformers.py", r"fluidtune\.|prepare_trainer|ReportCallback")


def test_the_example_runs_both_ways(no_ray: None, tmp_path: Path) -> None:
    script = [str(ROOT / "examples" / "digits_transformers.py"), "--samples", "2", "--epochs", "2"]
    stock, ours = run_both_ways(script, lambda name: ["--storage", str(tmp_path / name)], r"best accuracy (\S+)", 240)
    assert float(stock) == pytest.approx(float(ours), abs=0.02), (stock, ours)


def test_a_hyperparameter_search_runs_both_ways_and_its_trials_grow(no_ray: None, tmp_path: Path) -> None:
    """`Trainer.hyperparameter_search(backend="ray")` of a prepared Trainer, which is sent to the workers."""
    script = [str(ROOT / "tests" / "integrations" / "transformers_search.py")]
    found = run_both_ways(script, lambda name: [str(tmp_path / name)], r"objectives (.*)", 280)
    stock, ours = ([float(value) for value in line.split()] for line in found)
    assert ours == pytest.approx(stock, rel=1e-4)
    events = list(read_events(tmp_path / "ours" / "search" / EVENT_LOG_NAME))
    assert 2 in [len(e["devices"]) for e in events if e["event"] == "resized"]
    assert not [e for e in events if e["event"] in ("worker_lost", "growth_ended")]
