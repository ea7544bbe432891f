"""`fluidtune.shared` in the trials of real runs: one load for each node and job."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from ray import tune

import fluidtune
from tests.contracts.processes import until
from tests.tune.running import fit

pytestmark = [pytest.mark.ray, pytest.mark.newest]

DEFAULT, NUMBERED = fluidtune.FluidExecutor(), {"number": tune.grid_search([0, 1, 2, 3])}


@pytest.mark.core
def test_the_trials_of_a_job_load_once_and_the_next_job_loads_again(ray2, tmp_path):
    notes = tmp_path / "loads"
    notes.mkdir()

    def load() -> np.ndarray:
        (notes / f"{os.getpid()}-{time.time_ns()}").touch()
        return np.arange(1 << 20)

    def train(config: dict) -> None:
        data = fluidtune.shared(load)
        tune.report({"total": int(data.sum()) + config["number"]})

    for jobs in (1, 2):
        grid = fit("fluid", train, NUMBERED, tmp_path / str(jobs), executor=DEFAULT, metric="total")
        assert sorted(each.metrics["total"] for each in grid) == [((1 << 20) - 1) * (1 << 19) + n for n in range(4)]
        assert len(list(notes.iterdir())) == jobs
        until(lambda: not holding())


def holding() -> list[int]:
    """The processes that have shared data open or mapped: this one and those that it has started."""
    found = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error, OSError):
            folder = Path(f"/proc/{process.pid}")
            there = [os.readlink(each) for each in (folder / "fd").iterdir()] + [(folder / "maps").read_text()]
            found += [process.pid] * any("memfd:fluidtune-shared" in each for each in there)
    return found


def test_trials_have_a_tensor_of_with_parameters_once_and_each_its_own_changes(kept_parameters, tmp_path):
    """What holds no tensors stays in Ray's object store."""

    def train(config: dict, tensors=None, array=None, word=None) -> None:
        tensors["x"] += config["number"]
        mapped = "memfd:fluidtune-shared" in Path("/proc/self/maps").read_text()
        found = {"mapped": mapped, "view": not array.flags.writeable, "word": word}
        tune.report({"total": int(tensors["x"].sum()), **found})

    size = 16 << 20
    parameters = {"tensors": {"x": torch.ones(size, dtype=torch.uint8)}, "array": np.ones(size, np.uint8), "word": "x"}
    given = tune.with_parameters(train, **parameters)
    grid = fit("fluid", given, NUMBERED, tmp_path, executor=DEFAULT, metric="total")
    assert sorted(each.metrics["total"] for each in grid) == [size * (n + 1) for n in range(4)]
    for each in grid:
        assert each.metrics["mapped"] and each.metrics["view"] and each.metrics["word"] == "x"


def test_each_node_of_a_cluster_loads_once(one_node, tmp_path):
    one_node.add_node(num_cpus=1)
    loads = tmp_path / "loads"
    loads.mkdir()

    def load() -> np.ndarray:
        (loads / f"{ray.get_runtime_context().get_node_id()}-{os.getpid()}").touch()
        return np.ones(10)

    def train(config: dict) -> None:
        data = fluidtune.shared(load)
        time.sleep(1)
        tune.report({"total": data.sum(), "node": ray.get_runtime_context().get_node_id()})

    space = {"n": tune.grid_search(list(range(6)))}
    grid = fit("fluid", train, space, tmp_path / "runs", executor=DEFAULT, metric="total")
    nodes = [each.metrics["node"] for each in grid]
    assert len(set(nodes)) == 2
    assert sorted(each.name.split("-")[0] for each in loads.iterdir()) == sorted(set(nodes))
