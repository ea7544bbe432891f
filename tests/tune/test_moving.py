"""A packed trial with checkpoints of its own moves to a device that became free, and loses nothing."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from fluidtune import FluidExecutor
from fluidtune.report.story import story_of
from tests.tune.running import events_of, fit

pytestmark = [pytest.mark.ray, pytest.mark.newest]


class Contender(tune.Trainable):
    """Every step needs its GPU to itself for a while, so that sharing one costs time."""

    def setup(self, config: dict[str, Any]) -> None:
        self.value = 0.0

    def step(self) -> dict[str, Any]:
        gpu = os.environ["CUDA_VISIBLE_DEVICES"]
        with open(os.path.join(self.config["locks"], gpu), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep(0.1)
        self.value = 0.9 * self.value + self.config["x"]
        return {"value": self.value, "gpu": gpu, "done": self.iteration + 1 >= self.config["steps"][self.config["x"]]}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "value.json").write_text(json.dumps(self.value))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.value = json.loads(Path(checkpoint_dir, "value.json").read_text())


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
        metric="value",
    )
    assert not grid.errors
    events = events_of(tmp_path)
    moves = [e for e in events if e["event"] == "recovered" and "moved" in e["reason"]]
    assert len(moves) == 1
    for result in grid:
        rows = result.metrics_dataframe
        x = result.config["x"]
        assert list(rows["training_iteration"]) == list(range(1, steps[x] + 1))
        value = 0.0
        for seen in rows["value"]:
            value = 0.9 * value + x
            assert seen == pytest.approx(value)
        assert len(set(rows["gpu"])) == (2 if moves[0]["trial"] in result.path else 1)
    tells_of_its_move(story_of(events, moves[0]["trial"]).lines())


def tells_of_its_move(story: list[str]) -> None:
    """The trial was packed, was asked to leave when a device was idle, and moved at its own checkpoint."""
    words = "1 device idle; "
    lines = iter(story)
    for parts in (
        ("started on device", "at a share of 0.5"),
        ("was asked to leave its device", words, "left on 1 device of its own instead of", "at its share of 0.5"),
        ("left its devices: moved to another device: ", words),
        ("waits again",),
        ("moved and went on on device", "1 device idle, 1 trial waiting"),
        ("another worker has it", "moved to another device: ", words),
        ("It never grew: no call of a torch module with parameters was seen in it",),
    ):
        assert any(all(part in line for part in parts) for line in lines), (parts, story)
