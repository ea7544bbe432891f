"""Trials of Hugging Face's Trainer in real workers: resized at random moments, or killed, they report what stock does.

Needs Transformers and Accelerate: ``make test-frameworks``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray import tune

import fluidtune
from fluidtune.report import EVENT_LOG_NAME, read_events
from fluidtune.tune import tuning_job
from tests.tune.running import fit
from tests.tune.test_elastic import Restless

pytestmark = [pytest.mark.transformers, pytest.mark.ray]

ROOT = Path(__file__).parents[2]
METRICS = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step")


def values(result: Any) -> list[tuple[float, ...]]:
    table = result.metrics_dataframe
    return list(zip(*(table[name] for name in METRICS), strict=True))


def expected(folder: Path, epochs: int) -> list[tuple[float, ...]]:
    """What stock Ray Tune reports."""
    from . import transformers_trials

    space = {"epochs": epochs, "step": 0.0}
    return values(fit("stock", transformers_trials.searched, space, folder, metric="eval_loss", mode="min")[0])


def grown(folder: Path, **config: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The result of one trial on two devices, and the job's events."""
    from . import transformers_trials

    tuner = fluidtune.Tuner(
        transformers_trials.searched,
        param_space=config,
        tune_config=tune.TuneConfig(metric="eval_loss", mode="min"),
        run_config=tune.RunConfig(name="job", storage_path=str(folder), verbose=0),
        executor=fluidtune.FluidExecutor(devices="cpu:2", reserve=True),
    )
    result = tuner.fit()[0]
    assert result.error is None
    return result, list(read_events(folder / "job" / EVENT_LOG_NAME))


def assert_same(result: Any, alone: list[tuple[float, ...]]) -> None:
    got = values(result)
    assert len(got) == len(alone)
    for ours, theirs in zip(got, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_trial_that_is_resized_at_random_reports_what_stock_does(
    ray2: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = expected(tmp_path, 40)
    monkeypatch.setattr(tuning_job, "Engine", Restless)
    result, events = grown(tmp_path, epochs=40, step=0.1)
    assert_same(result, alone)
    widths = [len(e["devices"]) for e in events if e["event"] == "resized"]
    assert 1 in widths and 2 in widths, widths
    assert not [e for e in events if e["event"] in ("worker_lost", "growth_ended")]
    assert (Path(result.checkpoint.path) / "checkpoint" / "model.safetensors").is_file()


@pytest.mark.faults
@pytest.mark.parametrize("leader", [True, False])
def test_a_killed_worker_costs_no_epoch_and_repeats_none(ray2: None, tmp_path: Path, leader: bool) -> None:
    alone = expected(tmp_path, 30)
    result, events = grown(tmp_path, epochs=30, step=0.15, dies=(20, leader, str(tmp_path / "died")))
    assert_same(result, alone)
    assert (tmp_path / "died").exists(), "the trial never grew"
    assert [e for e in events if e["event"] == "worker_lost"]
    assert not [e for e in events if e["event"] == "growth_ended"]


def test_three_lines_of_the_example_are_changed() -> None:
    lines = (ROOT / "examples" / "digits_transformers.py").read_text().splitlines()
    marked = [line for line in lines if line.endswith("# elastic")]
    assert len(marked) == 3
    names = re.compile("fluidtune\\.|prepare_trainer|ReportCallback")
    assert [line for line in lines if names.search(line)] == marked


def test_the_example_runs_both_ways(no_ray: None, tmp_path: Path) -> None:
    script = [str(ROOT / "examples" / "digits_transformers.py"), "--samples", "2", "--epochs", "2"]
    found = []
    for name, command in (("stock", [sys.executable]), ("ours", [sys.executable, "-m", "fluidtune.cli", "run"])):
        whole = [*command, *script, "--storage", str(tmp_path / name)]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=240, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        found += re.findall(r"best accuracy (\S+)", done.stdout)
    assert len(found) == 2 and float(found[0]) == pytest.approx(float(found[1]), abs=0.02), found


def test_a_hyperparameter_search_runs_both_ways(no_ray: None, tmp_path: Path) -> None:
    """`Trainer.hyperparameter_search(backend="ray")` of a prepared Trainer, which is sent to the workers."""
    script = [str(ROOT / "tests" / "integrations" / "transformers_search.py")]
    found = []
    for name, command in (("stock", [sys.executable]), ("ours", [sys.executable, "-m", "fluidtune.cli", "run"])):
        done = subprocess.run(
            [*command, *script, str(tmp_path / name)], capture_output=True, text=True, timeout=280, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found += re.findall(r"objectives (.*)", done.stdout)
    assert len(found) == 2
    stock, ours = ([float(value) for value in line.split()] for line in found)
    assert ours == pytest.approx(stock, rel=1e-4)
