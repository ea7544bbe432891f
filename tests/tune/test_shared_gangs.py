"""A search whose trials need two GPUs at once, on a cluster that it shares with a job of single GPUs; real Ray."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from fluidtune import FluidExecutor
from tests.contracts.processes import until
from tests.tune.running import events_of, fit
from themis_bridge import JobInfo
from themis_bridge.agent import Gained, Leave
from themis_bridge.fairness import kinds_of
from themis_bridge.messages import Report
from themis_bridge.shell import control
from themis_bridge.shell.tenant import Tenant

pytestmark = [pytest.mark.ray, pytest.mark.newest, pytest.mark.usefixtures("ray_gpus")]


class Neighbour:
    """A job of single GPUs that wants both, and gives one back when its lease ends."""

    def __init__(self) -> None:
        self.tenant = Tenant("neighbour", self, {"GPU": 1.0}, "GPU")
        self.held: dict[str, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def report(self) -> Report:
        return Report((kinds_of([JobInfo(1, 1000.0)] * 2),), peak=2)

    def _loop(self) -> None:
        while not self._over.wait(0.05):
            for notice in self.tenant.poll():
                gpu = notice.gpu.id
                if isinstance(notice, Gained):
                    self.held[gpu] = notice.token
                elif self.held.get(gpu) == notice.token:
                    del self.held[gpu]
                    if isinstance(notice, Leave):
                        self.tenant.vacated(gpu, notice.token)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.tenant.close()


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    control.start("GPU", lease_s=5.0, notice_s=2.0, pace_s=0.5)
    there = Neighbour()
    until(lambda: len(there.held) == 2)
    yield there
    there.close()
    control.stop()


def look(config: dict[str, Any]) -> None:
    for step in range(3):
        tune.report({"score": step, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "")})


def test_trials_of_two_gpus_get_both_at_once_or_none(neighbour: Neighbour, tmp_path: Path) -> None:
    results = fit(
        "fluid",
        tune.with_resources(look, {"gpu": 2}),
        {"x": tune.grid_search([0, 1])},
        tmp_path,
        executor=FluidExecutor(arbiter="auto"),
    )
    assert len(results) == 2
    assert {result.metrics["gpus"] for result in results} <= {"0,1", "1,0"}
    assert [result.metrics["training_iteration"] for result in results] == [3] * 2
    started = events_of(tmp_path, "trial_started")
    assert all(len(event["devices"]) == 2 for event in started)
