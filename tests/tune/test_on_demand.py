"""Other work in the cluster goes on beside a job: what a trial starts itself, other jobs, and nodes that come later."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.util.placement_group import placement_group, remove_placement_group

from fluidtune import FluidExecutor
from fluidtune.report import EVENT_LOG_NAME, read_events
from tests.conftest import placement_groups
from tests.faults import jobs
from tests.faults.test_kills import undisturbed
from tests.tune.running import events_of, fit
from tests.tune.trainables import without_checkpoints

pytestmark = pytest.mark.ray

ON_DEMAND = FluidExecutor(reserve=False)


@ray.remote(num_cpus=1, scheduling_strategy="DEFAULT")
def double(x: int) -> int:
    return 2 * x


def nesting(config: dict[str, Any]) -> None:
    """Starts tasks of its own on the cluster's cores and waits for them."""
    values = ray.get([double.remote(x) for x in range(config["x"] + 2)])
    tune.report({"score": float(sum(values)), "groups": len(placement_groups())})


def picture() -> dict[str, float]:
    """How many placement groups there are, and how many cores are free. Ray may tell both late."""
    return {"groups": len(placement_groups()), "free": ray.available_resources().get("CPU", 0.0)}


def lasting(config: dict[str, Any]) -> None:
    """Trial 0 takes long. Each iteration says what was held and what was free after a while."""
    for iteration in range(8 if config["x"] == 0 else 1):
        time.sleep(0.7)
        tune.report({"score": float(iteration), **picture()})


@pytest.mark.usefixtures("ray4")
class TestBesideTrials:
    def test_tasks_of_a_trial_find_the_cores_that_trials_do_not_use(self, tmp_path: Path) -> None:
        results = fit("fluid", nesting, {"x": tune.grid_search([0, 1])}, tmp_path, executor=ON_DEMAND)
        assert [result.metrics["score"] for result in results] == [2.0, 6.0]
        assert max(result.metrics["groups"] for result in results) <= 2, "it holds no more devices than it has trials"

    @pytest.mark.core
    @pytest.mark.newest
    def test_a_trial_that_follows_another_takes_its_device(self, tmp_path: Path) -> None:
        space = {"x": tune.grid_search([1, 2, 3, 4]), "n": 3}
        fit("fluid", without_checkpoints, space, tmp_path, executor=ON_DEMAND, max_concurrent_trials=1)
        events = events_of(tmp_path)
        started = [event["devices"] for event in events if event["event"] == "trial_started"]
        gained = [event for event in events if event["event"] == "device_gained"]
        assert started == [[0]] * 4 and len(events[0]["devices"]) + len(gained) == 1

    @pytest.mark.core
    @pytest.mark.newest
    def test_a_reserved_job_holds_all_devices(self, tmp_path: Path) -> None:
        space = {"x": tune.grid_search([1])}
        results = fit("fluid", lasting, space, tmp_path, executor=FluidExecutor(reserve=True))
        assert (results[0].metrics["groups"], results[0].metrics["free"]) == (4, 0.0)


class Other(tune.Callback):
    """Somebody else, who asks for a core for a task, and for one in a placement group, once the trial has grown."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._task: Any = None
        self._group: Any = None
        #: The trial's iteration when this one asked, and when it was seen to have got both.
        self.asked = self.served = 0

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        if not self.asked:
            if any(e["event"] == "resized" and len(e["devices"]) == 2 for e in read_events(self._log)):
                self._task, self._group = double.remote(1), placement_group([{"CPU": 1}])
                self.asked = result["training_iteration"]
        elif not self.served and ray.wait([self._task], timeout=0)[0] and self._group.wait(0.001):
            remove_placement_group(self._group)
            self.served = result["training_iteration"]


def assert_undisturbed(result: Any, tmp_path: Path) -> None:
    """The losses do not depend on when the trial was resized."""
    values = list(result.metrics_dataframe["value"])
    # Where it takes long until the trial grows, the loss is 1e-5 and its last digits are roundings.
    alone = undisturbed("elastic", 3.0, len(values), tmp_path / "undisturbed")
    assert values == pytest.approx(alone, rel=1e-4, abs=1e-8)


@pytest.mark.core
@pytest.mark.usefixtures("ray2")
def test_a_trial_that_has_grown_gives_a_device_to_others_that_wait(tmp_path: Path) -> None:
    log = tmp_path / "fluid" / EVENT_LOG_NAME
    (tmp_path / "notes").mkdir()
    other = Other(log)
    space = {"x": 3.0, "iterations": 2000, "step": 0.05, "notes": str(tmp_path / "notes")}
    run = {"callbacks": [other], "stop": lambda trial, result: bool(other.served)}
    results = fit("fluid", jobs.elastic, space, tmp_path, executor=ON_DEMAND, metric="value", mode="min", run=run)
    assert 0 < other.asked < other.served < 2000
    events = events_of(tmp_path)
    assert [len(event["devices"]) for event in events if event["event"] == "resized"][-2:] == [2, 1]
    names = [event["event"] for event in events]
    assert names.count("device_returned") == 1 and not {"device_lost", "worker_lost"} & set(names)
    assert_undisturbed(results[0], tmp_path)


@pytest.mark.newest
def test_an_elastic_trial_grows_onto_a_node_that_comes_to_a_cluster_of_one(one_node: Any, tmp_path: Path) -> None:
    def said(what: str) -> list[dict[str, Any]]:
        return events_of(tmp_path, what) if (tmp_path / "fluid" / EVENT_LOG_NAME).exists() else []

    (tmp_path / "notes").mkdir()
    space = {"x": 3.0, "iterations": 2000, "step": 0.05, "notes": str(tmp_path / "notes")}
    run = {"stop": lambda trial, result: sum(event["width"] == 2 for event in said("trial_result")) >= 5}
    with ThreadPoolExecutor(1) as thread:
        settings = {"executor": ON_DEMAND, "metric": "value", "mode": "min", "run": run}
        job = thread.submit(fit, "fluid", jobs.elastic, space, tmp_path, **settings)
        while len(said("trial_result")) < 3 and not job.done():
            time.sleep(0.1)
        one_node.add_node(num_cpus=1)
        results = job.result()
    assert not said("worker_lost")
    there = [*said("run_started")[0]["devices"], *said("device_gained")]
    nodes = {device["device"]: device["node"] for device in there}
    # On a busy machine two workers may be slower for a while, and the trial then trains with one in between.
    grown = [event["devices"] for event in said("resized") if len(event["devices"]) == 2]
    assert grown and all(len({nodes[device] for device in devices}) == 2 for devices in grown)
    assert_undisturbed(results[0], tmp_path)


@pytest.mark.newest
def test_a_job_of_gpus_starts_on_a_cluster_that_gets_them_later(
    one_node: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(
            fit,
            "fluid",
            # It marks the function itself.
            tune.with_resources(lambda config: lasting(config), {"cpu": 1, "gpu": 1}),
            {"x": tune.grid_search([1, 2])},
            tmp_path,
            executor=ON_DEMAND,
        )
        while len(placement_groups()) < 2 and not job.done():
            time.sleep(0.05)  # what waits is what an autoscaler sees
        one_node.add_node(num_cpus=1, num_gpus=1)
        results = job.result()
    assert [result.metrics["groups"] for result in results] == [2, 1]
    assert "no node of the Ray cluster has that (0 GPU at most); its trials wait" in caplog.text
