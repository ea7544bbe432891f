"""A service that follows a search which still runs, in a real Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
from ray import tune
from ray.tune import Checkpoint

import fluidtune
from benchmarks.common import free_ports
from fluidtune.errors import FluidTuneError
from tests.conftest import assert_nothing_left
from tests.serve.driving import PATIENCE_S, until
from tests.serving.asking import ask

pytestmark = [pytest.mark.ray, pytest.mark.serve]


def train(config):
    """Gets better with each report, until somebody makes the file ``stop``."""
    score = 0
    while not Path(config["stop"]).exists():
        score += 1
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "score.json").write_text(json.dumps(score))
            tune.report({"score": score}, checkpoint=Checkpoint.from_directory(directory))
        time.sleep(0.5)


def load(directory, config):
    """Multiplies by the score."""
    score = json.loads(Path(directory, "score.json").read_text())

    def multiply(numbers):
        return [score * number for number in numbers]

    multiply.samples = [1, 2.5]
    return multiply


def test_what_a_running_search_finds_is_deployed_and_stays(one_ray, tmp_path, monkeypatch):
    """The search deletes each checkpoint but its last one, and the served one is loaded again."""
    one_ray.use(num_cpus=2)
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "1")
    stop = tmp_path / "stop"
    tuner = fluidtune.Tuner(
        train,
        param_space={"stop": str(stop)},
        tune_config=tune.TuneConfig(metric="score", mode="max"),
        run_config=tune.RunConfig(
            name="search",
            storage_path=str(tmp_path),
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
        ),
        executor=fluidtune.FluidExecutor(devices="cpu:1"),
    )
    search = threading.Thread(target=tuner.fit, daemon=True)
    search.start()

    def serve():
        try:
            return fluidtune.serve(tmp_path / "search", load, PATIENCE_S, follow=0.5, port=free_ports(1)[0])
        except FluidTuneError as error:
            assert "checkpoint" in str(error) or "is no run's directory" in str(error) or "rank" in str(error), error
            time.sleep(0.5)

    with until(serve) as served:
        first = served.status()["trials"][0]
        assert first["version"] == 1 and ask(served, 1)[0] == 200
        later = until(lambda: (found := served.status()["trials"][0])["version"] > 2 and found)
        assert later["value"] > first["value"] and later["trial"] == first["trial"]
        assert until(lambda: (found := ask(served, 1))[0] == 200 and found)[1] > first["value"]
        stop.touch()
        search.join(PATIENCE_S)
        assert not search.is_alive()
        rests = until(lambda: (found := served.status())["phase"] == "moved" and found)
        for pid in rests["device_pids"]:
            os.kill(pid, signal.SIGKILL)
        killed = {*rests["device_pids"]}
        until(lambda: len(pids := {*served.status()["device_pids"]}) == 2 and not pids & killed)
        assert until(lambda: (found := ask(served, 1))[0] == 200 and found)[1] > first["value"]
        assert [path.name for path in (tmp_path / "search" / "serving" / "checkpoints").iterdir()]
    assert [*(tmp_path / "search" / "serving" / "checkpoints").iterdir()] == []
    assert_nothing_left()
