"""A trial gets the resources that its script asks for, and other jobs of the cluster see them taken."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.util.placement_group import placement_group_table

from fluidtune import FluidExecutor
from fluidtune.report import occupancy_of
from tests.conftest import placement_groups
from tests.contracts.processes import until
from tests.tune.running import events_of, fit

pytestmark = pytest.mark.ray


def meet(config: dict[str, Any]) -> None:
    """Wait for a second trial where the job says where they meet."""
    if "meet" in config:
        place = Path(config["meet"])
        (place / str(config["x"])).touch()
        until(lambda: len(list(place.iterdir())) >= 2)


def look(config: dict[str, Any]) -> None:
    """Reports what the trial sees of the machine, twice so that the second is not at the start."""
    began = time.time()
    meet(config)
    time.sleep(0.3)
    tune.report(
        {
            "score": 1.0,
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "ids": ray.get_gpu_ids(),
            "accelerators": ray.get_runtime_context().get_accelerator_ids().get("GPU", []),
            "pid": os.getpid(),
            "began": began,
            "ended": time.time(),
            "free": dict(ray.available_resources()),
            "groups": sum(g["state"] == "CREATED" for g in placement_group_table().values()),
        }
    )


def together(results: Any) -> int:
    """The most trials that ran at one time."""
    spans = [(r.metrics["began"], r.metrics["ended"]) for r in results]
    return max(sum(a <= t < b for a, b in spans) for t, _ in spans)


def run(path: Path, resources: Any, trials: int = 4, meeting: bool = False, **executor: Any) -> Any:
    """``meeting``: the first two trials wait for each other."""
    space: dict[str, Any] = {"x": tune.grid_search(list(range(trials)))}
    if meeting:
        space["meet"] = str(path / "meeting")
        (path / "meeting").mkdir()
    asked = tune.with_resources(look, resources)
    results = fit("fluid", asked, space, path, executor=FluidExecutor(**executor))
    assert len(results) == trials
    return results


@pytest.mark.usefixtures("ray4")
class TestCPUs:
    def test_two_cores_each(self, tmp_path: Path) -> None:
        results = run(tmp_path, {"cpu": 2}, meeting=True)
        assert placement_groups() == [], "they are given back when fit returns"
        assert together(results) == 2
        assert {r.metrics["groups"] for r in results} == {2}
        assert all(r.metrics["free"].get("CPU", 0) == 0 for r in results), "other jobs must see the cores taken"

    def test_trials_that_ask_for_no_core_run_beside_those_that_hold_all(self, tmp_path: Path) -> None:
        @ray.remote(num_cpus=4)
        class Other:
            def ready(self) -> None: ...

        other = Other.remote()
        ray.get(other.ready.remote())
        try:
            results = run(tmp_path, {"licence": 1}, trials=2, meeting=True)
        finally:
            ray.kill(other)
        assert together(results) == 2

    def test_several_bundles_are_left_to_tune(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, logger="fluidtune"):
            results = run(tmp_path, tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 1}]), trials=3)
        warnings = [r for r in caplog.records if "left to Ray Tune" in r.getMessage()]
        assert len(warnings) == 1
        assert together(results) <= 2

    @pytest.mark.parametrize(("first", "xs"), [(1, [0, 1, 0, 2, 0]), (2, [0, 2, 0])])
    def test_trials_have_the_cores_that_each_asks_for_in_one_process(
        self, first: int, xs: list[int], tmp_path: Path
    ) -> None:
        """Seen: Ray named no core in a forked process, and its libraries kept their threads if they began with two."""

        def asks(config: dict[str, Any]) -> None:
            import torch

            has = ray.get_runtime_context().get_assigned_resources()
            tune.report({"score": 1.0, "has": has, "threads": torch.get_num_threads(), "x": config["x"]})

        sized = tune.with_resources(asks, lambda config: {"cpu": first + config["x"]})
        space = {"x": tune.grid_search(xs)}
        results = fit("fluid", sized, space, tmp_path, reuse_actors=True, executor=FluidExecutor())
        found = [(each.metrics["x"], each.metrics["has"], each.metrics["threads"]) for each in results]
        assert found == [(x, {"CPU": first + x}, first + x) for x in xs]


@pytest.mark.usefixtures("ray_gpus")
class TestGPUs:
    @pytest.mark.core
    def test_half_a_gpu_is_shared_by_two(self, tmp_path: Path) -> None:
        results = run(tmp_path, {"cpu": 1, "gpu": 0.5}, devices="gpu:1", meeting=True)
        assert together(results) == 2
        assert len({r.metrics["gpus"] for r in results}) == 1

    def test_a_trial_over_two_gpus_is_one_process_that_sees_both(self, tmp_path: Path) -> None:
        results = run(tmp_path, {"cpu": 2, "gpu": 2}, trials=2)
        assert {r.metrics["gpus"] for r in results} == {"0,1"}
        assert all(sorted(r.metrics["ids"]) == [0, 1] for r in results)
        assert all(sorted(r.metrics["accelerators"]) == ["0", "1"] for r in results)
        assert together(results) == 1
        events = events_of(tmp_path)
        assert not [e for e in events if e["event"].startswith("resize")]
        occupancy_of(events)


def test_a_later_trial_of_several_bundles_runs_as_under_stock(tmp_path: Path) -> None:
    """Seen: it failed ("ask for as many in all of them") if the job's first trial had asked for one bundle."""

    def asks(config: dict[str, Any]) -> None:
        request = tune.get_context().get_trial_resources()
        marker = Path(config["place"], str(config["x"]))
        for _ in range(2):
            tune.report({"score": config["x"], "bundles": len(request.bundles)})
        if config["x"] and not marker.exists():
            marker.touch()
            raise RuntimeError("once")

    def wanted(config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([{"CPU": 1}] * (1 + config["x"]))

    space = {"x": tune.grid_search([0, 1, 0]), "place": str(tmp_path)}
    sized = tune.with_resources(asks, wanted)
    retried = {"failure_config": tune.FailureConfig(max_failures=1)}
    results = fit("fluid", sized, space, tmp_path, run=retried, executor=FluidExecutor())
    # A trial that is tried again is the last one.
    assert [(r.metrics["bundles"], r.metrics["training_iteration"]) for r in results] == [(1, 2), (1, 2), (2, 2)]
