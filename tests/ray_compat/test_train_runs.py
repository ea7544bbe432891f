"""Workers of Ray Train V2 start in placement groups that are there, and the run makes none of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table

from fluidtune.ray_compat import ownership

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def group_here(config: dict[str, str]) -> None:
    rank = ray.train.get_context().get_world_rank()
    Path(config["folder"], str(rank)).write_text(ray.get_runtime_context().get_placement_group_id())


class Trial:
    """An actor whose run of Ray Train gets the places."""

    def run(self, places: list[Any], folder: str) -> Any:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        asked: list[Any] = []

        def place(count: int, each: dict[str, float]) -> list[Any]:
            asked.append((count, each))
            return places

        ownership.watch()
        ownership.place_train_runs(place)
        TorchTrainer(
            group_here,
            train_loop_config={"folder": folder},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        return asked, [each["state"] for each in placement_group_table().values()]


def test_each_worker_starts_in_its_place(no_ray: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    groups = [placement_group([{"CPU": 1}]) for _ in range(2)]
    assert all(group.wait(60) for group in groups)
    trial = ray.remote(num_cpus=1)(Trial).remote()
    asked, made = ray.get(trial.run.remote([(group, 0) for group in groups], str(tmp_path)))
    assert asked == [(2, {"CPU": 1})] and made == ["CREATED"] * 2, "for a group of its own there are no cores"
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [group.id.hex() for group in groups]
