"""Workers of elastic Horovod trials, rank 0 included, are killed at random moments."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from ray import tune

import fluidtune
from fluidtune.report import EVENT_LOG_NAME, read_events
from tests.faults import horovod_jobs, jobs
from tests.faults.test_kills import busy_workers, reported, undisturbed

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.horovod]

#: How often a worker is killed.
KILLS = 20
#: Workers of the trial, unless the engine finds that one alone is as fast.
WIDTH = 2


class Killer(threading.Thread):
    """Kills ``kills`` randomly chosen workers of the job, each at a random moment after the group was complete.

    If the group does not become complete within `ALONE_S` seconds, the worker that is alone is killed.
    """

    ALONE_S = 12.0

    def __init__(self, log: Path, kills: int):
        super().__init__(daemon=True)
        self.log, self.random, self.wanted, self.over = log, random.Random(kills), kills, False
        #: The time of each kill, as unix time.
        self.kills: list[float] = []

    def run(self) -> None:
        try:
            self._kill()
        finally:
            (self.log.parent.parent / "enough").touch()

    def _kill(self) -> None:
        seen = 0
        while len(self.kills) < self.wanted and not self.over:
            time.sleep(0.05)
            events = read_events(self.log) if self.log.exists() else []
            pids = busy_workers(events)
            complete = sum(e["event"] == "resized" and len(e["devices"]) == WIDTH for e in events)
            alone = pids and self.kills and time.time() > self.kills[-1] + self.ALONE_S
            if (complete == seen or len(pids) < WIDTH) and not alone:
                continue
            time.sleep(self.random.uniform(0.0, 0.5))
            try:
                os.kill(self.random.choice(pids), signal.SIGKILL)
            except ProcessLookupError:
                continue
            seen = complete
            self.kills.append(time.time())


def fit(trainable, tmp_path: Path):
    """Train until the killer has done all its kills."""
    (tmp_path / "notes").mkdir()
    enough = str(tmp_path / "enough")
    return fluidtune.Tuner(
        trainable,
        param_space={"x": 1.0, "iterations": 100_000, "step": 0.24, "notes": str(tmp_path / "notes")},
        tune_config=tune.TuneConfig(metric="value", mode="min"),
        run_config=tune.RunConfig(
            name="job", storage_path=str(tmp_path), verbose=0, stop=lambda *_: os.path.exists(enough)
        ),
        executor=fluidtune.FluidExecutor(devices="cpu:2", backend="horovod"),
    ).fit()


@pytest.mark.timeout(420)
@pytest.mark.usefixtures("ray2")
@pytest.mark.parametrize("kind", ["script", "elastic"])
def test_workers_killed_20_times_at_random_moments(kind, tmp_path):
    log = tmp_path / "job" / EVENT_LOG_NAME
    killer = Killer(log, KILLS)
    killer.start()
    grid = fit(horovod_jobs.scripted if kind == "script" else jobs.elastic, tmp_path)
    killer.over = True
    killer.join()
    assert not grid.errors
    assert len(killer.kills) == KILLS
    lines = reported(tmp_path)[1.0]
    iterations = len(lines)
    assert [line["training_iteration"] for line in lines] == list(range(1, iterations + 1))
    tmp = tmp_path / "undisturbed"
    expected = (
        horovod_jobs.alone(1.0, iterations, tmp) if kind == "script" else undisturbed("elastic", 1.0, iterations, tmp)
    )
    assert [line["value"] for line in lines] == pytest.approx(expected, rel=1e-4)
    events = list(read_events(log))
    # No other worker was lost than those that were killed.
    assert sum(event["event"] == "worker_lost" for event in events) <= KILLS
    results = [event["t"] for event in events if event["event"] == "trial_result"]
    pauses = sorted(min(t for t in results if t > kill) - kill for kill in killer.kills)
    print(f"from a kill to the next result: median {pauses[KILLS // 2]:.2f} s, most {pauses[-1]:.2f} s")
