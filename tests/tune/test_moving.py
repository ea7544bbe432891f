"""A packed trial with checkpoints of its own moves to a device that became free, and loses nothing."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from fluidtune import FluidExecutor
from tests.tune.running import events_of, fit
from tests.tune.trainables import Stepper

pytestmark = [pytest.mark.ray, pytest.mark.newest]


class Contender(Stepper):
    """Every step needs its GPU to itself for a while, so that sharing one costs time."""

    def step(self) -> dict[str, Any]:
        gpu = os.environ["CUDA_VISIBLE_DEVICES"]
        with open(os.path.join(self.config["locks"], gpu), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep(0.1)
        return {**super().step(), "gpu": gpu, "done": self.at >= self.config["steps"][self.x]}


@pytest.mark.usefixtures("ray_gpus")
def test_a_packed_trial_moves_at_its_own_checkpoint(tmp_path: Path) -> None:
    # The first and the third share a GPU, the others too; the second, left alone, shows what sharing costs.
    steps = {1.0: 100, 2.0: 45, 3.0: 100, 4.0: 20}
    (tmp_path / "locks").mkdir()
    grid = fit(
        "fluid",
        tune.with_resources(Contender, {"cpu": 1, "gpu": 1}),
        {"x": tune.grid_search(list(steps)), "locks": str(tmp_path / "locks"), "steps": steps},
        tmp_path,
        executor=FluidExecutor(devices="gpu:2", max_packing=2),
        run={"stop": {"training_iteration": 100}, "checkpoint_config": tune.CheckpointConfig(checkpoint_frequency=5)},
    )
    events = events_of(tmp_path)
    moves = [e for e in events if e["event"] == "recovered" and "moved" in e["reason"]]
    assert len(moves) == 1
    for result in grid:
        rows = result.metrics_dataframe
        x = result.config["x"]
        assert list(rows["training_iteration"]) == list(rows["at"]) == list(range(1, steps[x] + 1))
        assert len(set(rows["gpu"])) == (2 if moves[0]["trial"] in result.path else 1)
