"""Real processes are killed at random moments: no result is lost or reported twice, and no process is left."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from ray import tune

import fluidtune
from fluidtune.report import EVENT_LOG_NAME, read_events
from tests.faults import jobs

pytestmark = [pytest.mark.ray, pytest.mark.faults]

#: Whether a trial that has reported ``last`` iterations may go on after ``kept`` of them, and report the others again.
#: Elastic ones keep all, but begin anew until the second commit, which proves the first, is written.
GOES_ON_AFTER = {
    "plain": lambda kept, last: kept == 0,
    "checkpointing": lambda kept, last: kept % 3 == 0,
    "elastic": lambda kept, last: kept == 0 and last <= 2,
}


def reported(storage: Path) -> dict[float, list[dict]]:
    """The rows of each trial's result.json, by the trial's x."""
    found = {}
    for path in storage.glob("*/*/result.json"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[lines[0]["config"]["x"]] = lines
    return found


def undisturbed(kind: str, x: float, iterations: int, tmp: Path) -> list[float]:
    """The values that the same trial reports undisturbed. It runs in this process."""
    values = []
    original, tune.report = tune.report, lambda metrics, checkpoint=None: values.append(metrics["value"])
    get, tune.get_checkpoint = tune.get_checkpoint, lambda: None
    try:
        tmp.mkdir(exist_ok=True)
        jobs.TRAINABLES[kind]({"x": x, "iterations": iterations, "step": 0.0, "notes": str(tmp)})
    finally:
        tune.report, tune.get_checkpoint = original, get
    return values


def check_reports(kind: str, storage: Path, trials: int, iterations: int, tmp: Path) -> None:
    found = reported(storage)
    assert sorted(found) == [float(i + 1) for i in range(trials)]
    for x, lines in found.items():
        numbers = [line["training_iteration"] for line in lines]
        again = [(last, next_) for last, next_ in pairwise([0, *numbers]) if next_ != last + 1]
        assert all(next_ <= last and GOES_ON_AFTER[kind](next_ - 1, last) for last, next_ in again), (x, again)
        assert numbers[-1] == iterations
        expected = undisturbed(kind, x, iterations, tmp / "undisturbed")
        assert [line["value"] for line in lines] == pytest.approx([expected[n - 1] for n in numbers], rel=1e-4), x


def busy_workers(events: list[dict], may_die: Callable[[str], bool] = bool, after: float = 0.0) -> list[int]:
    """Process ids of living workers that have completed an iteration, ``after`` a time, of a trial that ``may_die``.

    Workers that die again and again while they start are counted as the trial's own failures.
    """
    devices: dict[str, list[int]] = {}
    pids: dict[str, int] = {}
    busy: dict[int, str] = {}
    worked: dict[int, float] = {}
    for event in events:
        if event["event"] in ("trial_started", "resized"):
            devices[event["trial"]] = event["devices"]
        elif event["event"] in ("worker_started", "spare_taken"):
            pids.setdefault(event["worker"], event.get("pid", 0))
            if not event.get("spare"):
                busy[event["device"]] = event["worker"]
                worked.pop(event["device"], None)
        elif event["event"] == "trial_result" and may_die(event["trial"]):
            worked.update(dict.fromkeys(devices.get(event["trial"], ()), event["t"]))
    pid_of = {device: pids[worker] for device, worker in busy.items() if worked.get(device, 0) > after}
    return [pid for pid in pid_of.values() if psutil.pid_exists(pid)]


class Killer(threading.Thread):
    """Kills a worker of the job ``wanted`` times, each at a random moment after progress.

    An elastic trial begins anew until it has two commits, of which the second proves the first: none is killed before.
    """

    def __init__(self, log: Path, kind: str, wanted: int):
        super().__init__(daemon=True)
        self.log, self.random, self.wanted, self.kills, self.over = log, random.Random(kind), wanted, 0, False
        self.elastic, self.last = kind == "elastic", 0.0

    def may_die(self, trial: str) -> bool:
        return not self.elastic or any(self.log.parent.glob(f"*{trial}*/.fluid_commit/commit-1"))

    def run(self):
        while self.kills < self.wanted and not self.over:
            time.sleep(0.05)
            pids = busy_workers(read_events(self.log), self.may_die, self.last) if self.log.exists() else []
            if not pids:
                continue
            time.sleep(self.random.uniform(0.0, 0.5))
            try:
                os.kill(self.random.choice(pids), signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.kills, self.last = self.kills + 1, time.time()


def fit(kind: str, tmp_path: Path, trials: int, iterations: int, step: float, devices: str = "cpu:2"):
    (tmp_path / "notes").mkdir()
    tuner = fluidtune.Tuner(
        jobs.TRAINABLES[kind],
        param_space={
            "x": tune.grid_search([float(i + 1) for i in range(trials)]),
            "iterations": iterations,
            "step": step,
            "notes": str(tmp_path / "notes"),
        },
        tune_config=tune.TuneConfig(metric="value", mode="min"),
        run_config=tune.RunConfig(name="job", storage_path=str(tmp_path), verbose=0),
        executor=fluidtune.FluidExecutor(devices=devices),
    )
    return tuner.fit()


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ray2")
@pytest.mark.parametrize("kind", [pytest.param("elastic", marks=pytest.mark.core), "checkpointing", "plain"])
def test_workers_killed_at_random_moments(kind, kills, tmp_path):
    wanted = 2 * kills
    # At first there is one trial more than there are devices. At the end there are fewer, so elastic trials grow wide.
    # A plain trial begins anew after each kill, so there are many short ones.
    trials, iterations, step = (2 + wanted, 40, 0.05) if kind == "plain" else (3, 10 + 10 * wanted, 0.1)
    killer = Killer(tmp_path / "job" / EVENT_LOG_NAME, kind, wanted)
    killer.start()
    grid = fit(kind, tmp_path, trials, iterations, step)
    killer.over = True
    killer.join()
    assert not grid.errors
    assert killer.kills == wanted
    check_reports(kind, tmp_path, trials, iterations, tmp_path)
    events = read_events(tmp_path / "job" / EVENT_LOG_NAME)
    lost = sum(e["event"] == "worker_lost" for e in events)
    # The loss of an idle worker is noticed only when a trial needs it.
    assert lost >= killer.kills // 2
