"""Trials in forked processes on real Ray: each finds what it would find in a process of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune

import fluidtune
from fluidtune.cluster.forks.child import is_forked
from tests.contracts.processes import python

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("no_ray")]

#: A library that can be set once a process, as Accelerate's state can, and counts who has done so.
LIBRARY = """
STATE, REGISTRY = {}, []
def configure(index, precision):
    if STATE and STATE["precision"] != precision:
        raise ValueError("has already been initialized")
    STATE["precision"] = precision
    REGISTRY.append(index)
"""
SCRIPT = """
import json, os, sys
import ray
from ray import tune
import its_library
from fluidtune.cluster.forks.child import is_forked

def train(config):
    import its_library
    its_library.configure(config["index"], config["index"] % 3)
    tune.report({"pid": os.getpid(), "forked": is_forked(), "registered": its_library.REGISTRY})

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
run_config = tune.RunConfig(name="job", storage_path=sys.argv[1], verbose=0)
trainable = tune.with_resources(train, {"cpu": 2})
space = {"index": tune.grid_search(list(range(6)))}
results = tune.Tuner(trainable, param_space=space, run_config=run_config).fit()
print(json.dumps([[str(each.error) for each in results if each.error], [each.metrics for each in results]]))
"""


@pytest.mark.core
def test_a_trial_finds_nothing_that_another_has_left(tmp_path: Path) -> None:
    """A spare takes no core in Ray's books, and its libraries must be given the threads of a trial's cores."""
    (tmp_path / "its_library.py").write_text(LIBRARY)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["-m", "fluidtune", "run", str(script), str(tmp_path)]
    said = python(*words, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{os.getcwd()}")
    errors, rows = json.loads(said.splitlines()[-1])
    assert errors == []
    assert len({row["pid"] for row in rows}) == 6 and sum(bool(row["forked"]) for row in rows) >= 4
    assert [row["registered"] for row in rows] == [[index] for index in range(6)]
    log = (tmp_path / "job" / "fluid_events.jsonl").read_text()
    events = [json.loads(line) for line in log.splitlines()]
    assert any(each["event"] == "spare_taken" for each in events)
    assert not any(each["event"] == "worker_lost" for each in events)


class BothNodesFork(tune.Stopper):
    """Ends the run when a forked process of each of two nodes has reported."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self.nodes.update([result["node"]] if result["forked"] else [])
        return False

    def stop_all(self) -> bool:
        return len(self.nodes) == 2


def test_the_drivers_node_forks_in_a_cluster_that_others_have_started_and_so_does_another_node(
    one_node: Any, tmp_path: Path
) -> None:
    # Seen: in a cluster of `ray start` each trial on the driver's node got a plain process, which took seconds.
    one_node.add_node(num_cpus=1)

    def train(config: dict[str, Any]) -> None:
        forked = is_forked()
        tune.report({"node": ray.get_runtime_context().get_node_id(), "forked": forked})

    ends = BothNodesFork()
    run_config = tune.RunConfig(name="job", storage_path=str(tmp_path), verbose=0, stop=ends)
    tuned = tune.TuneConfig(num_samples=80)
    fluidtune.Tuner(train, run_config=run_config, tune_config=tuned, param_space={"x": tune.uniform(0, 1)}).fit()
    assert len(ends.nodes) == 2
