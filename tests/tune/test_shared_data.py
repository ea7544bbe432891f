"""`fluidtune.shared` in the trials of real runs: one load for each node and job."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from ray import tune

import fluidtune

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray2")]


@pytest.mark.core
def test_the_trials_of_a_job_load_once_and_the_next_job_loads_again(tmp_path):
    notes = tmp_path / "loads"
    notes.mkdir()

    def load() -> np.ndarray:
        (notes / f"{os.getpid()}-{time.time_ns()}").touch()
        return np.arange(1 << 20)

    def train(config: dict) -> None:
        data = fluidtune.shared(load)
        tune.report({"total": int(data.sum()) + config["number"]})

    for jobs in (1, 2):
        grid = fluidtune.Tuner(
            train,
            param_space={"number": tune.grid_search([0, 1, 2, 3])},
            run_config=tune.RunConfig(storage_path=str(tmp_path / str(jobs))),
        ).fit()
        assert sorted(each.metrics["total"] for each in grid) == [((1 << 20) - 1) * (1 << 19) + n for n in range(4)]
        assert len(list(notes.iterdir())) == jobs
