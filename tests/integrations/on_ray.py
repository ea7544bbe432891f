"""Trials of a framework on real Ray, and its example: what the tests of all frameworks do with them."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ray import tune

import fluidtune
from fluidtune.report import EVENT_LOG_NAME, read_events
from fluidtune.tune import tuning_job
from tests.tune.running import fit
from tests.tune.test_elastic import Restless

ROOT = Path(__file__).parents[2]
#: Stock Ray Tune, and FluidTune.
BOTH_WAYS = (("stock", [sys.executable]), ("ours", [sys.executable, "-m", "fluidtune.cli", "run"]))


class OnRay:
    """Runs of one trial. ``metrics``: what is compared of its results. ``best``: the metric that is to be small.

    ``module``: its ``searched`` is the trial. It is imported when it is needed: the framework may not be installed.
    """

    def __init__(self, module: str, metrics: Sequence[str], best: str, rel: float) -> None:
        self._module, self._metrics, self._best, self._rel = module, metrics, best, rel

    def _trial(self) -> Any:
        return importlib.import_module(f"tests.integrations.{self._module}").searched

    def _values(self, result: Any) -> list[tuple[float, ...]]:
        table = result.metrics_dataframe
        return list(zip(*(table[name] for name in self._metrics), strict=True))

    def expected(self, folder: Path, epochs: int) -> list[tuple[float, ...]]:
        """What stock Ray Tune reports."""
        space = {"epochs": epochs, "step": 0.0}
        return self._values(fit("stock", self._trial(), space, folder, metric=self._best, mode="min")[0])

    def grown(self, folder: Path, **config: Any) -> tuple[Any, list[dict[str, Any]]]:
        """The result of one trial on two devices, and the job's events."""
        tuner = fluidtune.Tuner(
            self._trial(),
            param_space=config,
            tune_config=tune.TuneConfig(metric=self._best, mode="min"),
            run_config=tune.RunConfig(name="job", storage_path=str(folder), verbose=0),
            executor=fluidtune.FluidExecutor(devices="cpu:2", reserve=True),
        )
        result = tuner.fit()[0]
        assert result.error is None
        return result, list(read_events(folder / "job" / EVENT_LOG_NAME))

    def resized_at_random(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **config: Any) -> tuple[Any, list[int]]:
        """The result, which is stock Ray Tune's, and the widths of a trial whose workers are resized all the time."""
        alone = self.expected(folder, config["epochs"])
        monkeypatch.setattr(tuning_job, "Engine", Restless)
        result, events = self.grown(folder, **config)
        self.assert_same(result, alone)
        assert not [e for e in events if e["event"] in ("worker_lost", "growth_ended")]
        return result, [len(e["devices"]) for e in events if e["event"] == "resized"]

    def loses_a_worker(self, folder: Path, epochs: int, step: float, after: int, leader: bool) -> None:
        """A worker is killed once, in or after epoch or step ``after``; the result is stock Ray Tune's."""
        alone = self.expected(folder, epochs)
        result, events = self.grown(folder, epochs=epochs, step=step, dies=(after, leader, str(folder / "died")))
        self.assert_same(result, alone)
        assert (folder / "died").exists(), "the trial never grew"
        assert [e for e in events if e["event"] == "worker_lost"]
        assert not [e for e in events if e["event"] == "growth_ended"]

    def assert_same(self, result: Any, alone: list[tuple[float, ...]]) -> None:
        got = self._values(result)
        assert len(got) == len(alone)
        for ours, theirs in zip(got, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=self._rel)


def assert_three_lines_changed(example: str, names: str) -> None:
    """``names``: a pattern of what only a changed line has."""
    lines = (ROOT / "examples" / example).read_text().splitlines()
    marked = [line for line in lines if line.endswith("# elastic")]
    assert len(marked) == 3
    assert [line for line in lines if re.search(names, line)] == marked


def run_both_ways(script: Sequence[str], storage: Callable[[str], list[str]], pattern: str, limit: float) -> list[str]:
    """What the script prints by the pattern, first under stock Ray Tune. ``storage``: its last arguments."""
    found = []
    for name, command in BOTH_WAYS:
        whole = [*command, *script, *storage(name)]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=limit, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        found += re.findall(pattern, done.stdout)
    assert len(found) == 2, found
    return found


def assert_example_runs_both_ways(example: str, storage: Path, within: float) -> None:
    """Its best accuracy differs from that under stock Ray Tune by at most ``within``."""
    script = [str(ROOT / "examples" / example), "--samples", "2", "--epochs", "2"]
    stock, ours = run_both_ways(script, lambda name: ["--storage", str(storage / name)], r"best accuracy (\S+)", 240)
    assert float(stock) == pytest.approx(float(ours), abs=within), (stock, ours)
