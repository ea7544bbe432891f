"""Elastic trials on real workers: resized at random moments, a trial has the results of an undisturbed run."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune
from ray.tune.schedulers import HyperBandScheduler

import fluidtune
from fluidtune.engine import messages as m
from fluidtune.tune import tuning_job
from tests.engine.helpers import resize, start
from tests.faults import jobs
from tests.faults.test_kills import undisturbed
from tests.tune.running import events_of, fit

pytestmark = pytest.mark.ray

ITERATIONS = 200


class Restless:
    """An engine that runs one trial and changes its width at random, as fast as resizes are answered."""

    def __init__(self, **settings: Any):
        self.waiting_count = 0
        self._random = random.Random(7)
        self._devices: set[int] = set()
        self._trial = ""
        self._held: tuple[int, ...] = ()
        self._resizing = False

    def has_device(self, device: int) -> bool:
        return device in self._devices

    def is_free(self, device: int) -> bool:
        return device not in self._held

    def tenants(self, device: int) -> tuple[str, ...]:
        return ()

    @property
    def held_count(self) -> int:
        return len(self._held)

    def runs_on(self, trial: str) -> tuple[int, ...]:
        return self._held

    def held_devices(self) -> dict[str, tuple[int, ...]]:
        return {self._trial: self._held}

    def trial(self, name: str) -> Any:
        return SimpleNamespace(devices=self._held)

    def handle(self, *events: m.Event, now: float) -> list[m.Instruction]:
        out: list[m.Instruction] = []
        for event in events:
            if isinstance(event, m.DeviceGained):
                self._devices.add(event.device)
            elif isinstance(event, m.TrialAdded):
                self._trial, self._held = event.trial, (0,)
                out.append(start(event.trial, self._held, 1.0))
            elif isinstance(event, m.Resized):
                self._resizing, self._held = False, event.devices
            elif isinstance(event, m.Result) and not self._resizing and self._random.random() < 0.7:
                self._resizing = True
                out.append(resize(event.trial, (0, 1) if self._held == (0,) else (0,)))
        return out


@pytest.mark.core
def test_trials_that_are_stopped_while_paused_leave_no_commits(ray2: None, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    xs = tune.grid_search([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    space = {"x": xs, "iterations": 4, "step": 0.01, "notes": str(tmp_path / "notes")}
    config = {"metric": "value", "mode": "min", "scheduler": HyperBandScheduler(max_t=4, reduction_factor=2)}
    results = fit("fluid", jobs.elastic, space, tmp_path, **config)
    assert len(results) == 6 and not results.errors
    assert min(result.metrics["training_iteration"] for result in results) < 4, "none was stopped while it was paused"
    assert not list(tmp_path.glob("fluid/*/.fluid_commit"))


@pytest.mark.core
def test_losses_do_not_depend_on_when_a_trial_is_resized(
    tmp_path: Path, ray2: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_job, "Engine", Restless)
    (tmp_path / "notes").mkdir()
    space = {"x": 3.0, "iterations": ITERATIONS, "step": 0.06, "notes": str(tmp_path / "notes")}
    executor = fluidtune.FluidExecutor(devices="cpu:2", reserve=True)
    run = {"stop": {"training_iteration": ITERATIONS}}
    result = fit("fluid", jobs.elastic, space, tmp_path, executor=executor, run=run, metric="value", mode="min")[0]
    values = list(result.metrics_dataframe["value"])
    expected = undisturbed("elastic", 3.0, ITERATIONS, tmp_path / "undisturbed")
    assert values == pytest.approx(expected, rel=1e-4)
    events = events_of(tmp_path)
    assert not [e for e in events if e["event"] == "worker_lost"]
    replaced = [e for e in events if e["event"] == "worker_replaced"]
    assert {e["reason"] for e in replaced} - {"a resize was called off"} == {"its trial has fewer devices now"}
    widths = [len(e["devices"]) for e in events if e["event"] == "resized"]
    assert widths.count(2) >= 3 and widths.count(1) >= 3, widths
