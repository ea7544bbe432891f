"""Real processes, real SIGKILL, at random moments: nothing lost, nothing reported twice, nothing left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest
import ray
from ray import tune
from ray.util.placement_group import placement_group_table

import fluidtune
from fluidtune.report import EVENT_LOG_NAME, read_events
from tests.faults import jobs

pytestmark = [pytest.mark.ray, pytest.mark.faults]

ROOT = Path(__file__).resolve().parents[2]
KILLS = 20


def reported(storage: Path) -> dict[float, list[dict]]:
    """What Tune's own logger wrote down, by the trial's x."""
    found = {}
    for path in (storage / "job").glob("*/result.json"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[lines[0]["config"]["x"]] = lines
    return found


def undisturbed(kind: str, x: float, iterations: int, tmp: Path) -> list[float]:
    """The values that the same trial reports when nothing happens to it: run here, in this process."""
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
        assert [line["training_iteration"] for line in lines] == list(range(1, iterations + 1)), x
        expected = undisturbed(kind, x, iterations, tmp / "undisturbed")
        assert [line["value"] for line in lines] == pytest.approx(expected, rel=1e-4), x


def busy_workers(events: list[dict]) -> list[int]:
    """Process ids of living workers that have done an iteration: killing one again and again in its start would be
    taken for the trial's own fault."""
    devices: dict[str, list[int]] = {}
    started: dict[int, tuple[float, int]] = {}
    worked: dict[int, float] = {}
    for event in events:
        if event["event"] in ("trial_started", "resized"):
            devices[event["trial"]] = event["devices"]
        elif event["event"] == "worker_started":
            started[event["device"]] = event["t"], event["pid"]
        elif event["event"] == "trial_result":
            worked.update(dict.fromkeys(devices.get(event["trial"], ()), event["t"]))
    return [pid for device, (since, pid) in started.items() if worked.get(device, 0) > since and psutil.pid_exists(pid)]


class Killer(threading.Thread):
    """Kills a worker of the job at random moments, each time after it made progress."""

    def __init__(self, log: Path, seed: int):
        super().__init__(daemon=True)
        self.log, self.random, self.kills, self.over = log, random.Random(seed), 0, False

    def run(self):
        while self.kills < KILLS and not self.over:
            time.sleep(0.05)
            pids = busy_workers(read_events(self.log)) if self.log.exists() else []
            if not pids:
                continue
            time.sleep(self.random.uniform(0.0, 0.5))
            try:
                os.kill(self.random.choice(pids), signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.kills += 1


@pytest.fixture
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


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


def nothing_left() -> None:
    """No actor, no placement group of the job in a cluster that lives on."""
    deadline = time.monotonic() + 20
    while True:
        groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
        free = ray.available_resources().get("CPU", 0)
        mine = [p.pid for p in psutil.process_iter(["name"]) if "ray::Worker" in p.info["name"] and is_ours(p)]
        if not groups and free == ray.cluster_resources()["CPU"] and not mine:
            return
        assert time.monotonic() < deadline, (groups, free, mine)
        time.sleep(0.2)


def is_ours(process: psutil.Process) -> bool:
    try:
        return any(parent.pid == os.getpid() for parent in process.parents())
    except psutil.NoSuchProcess:
        return False


@pytest.mark.timeout(420)
@pytest.mark.parametrize("kind", ["elastic", "checkpointing", "plain"])
def test_workers_killed_20_times_at_random_moments(kind, cluster, tmp_path):
    # One trial more than devices at first, and fewer at the end, where the elastic ones are wide.
    # A plain one begins again, and is soon over.
    trials, iterations, step = {"elastic": (3, 150, 0.1), "checkpointing": (3, 150, 0.1), "plain": (24, 40, 0.05)}[kind]
    killer = Killer(tmp_path / "job" / EVENT_LOG_NAME, seed=hash(kind) % 1000)
    killer.start()
    grid = fit(kind, tmp_path, trials, iterations, step)
    killer.over = True
    killer.join()
    assert not grid.errors
    assert killer.kills == KILLS
    check_reports(kind, tmp_path, trials, iterations, tmp_path)
    events = read_events(tmp_path / "job" / EVENT_LOG_NAME)
    lost = sum(e["event"] == "worker_lost" for e in events)
    # One that was idle is noticed when it is needed next, if ever.
    assert lost >= killer.kills // 2
    nothing_left()


#: Ray's own, which may outlive a killed driver by more than half a minute under stock Tune, too.
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def tagged(tag: str) -> list[psutil.Process]:
    """Processes that the driver with this tag started and left behind, Ray's agents aside: these are ended here."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLUIDTUNE_TEST_TAG") != tag:
                continue
            if process.name() in RAYS_AGENTS:
                process.kill()
            else:
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind, kills", [("elastic", 10), ("checkpointing", 10)])
def test_driver_killed_at_random_moments(kind, kills, tmp_path):
    trials, iterations, step = 4, 120, 0.1
    rng = random.Random(kills)
    done = tmp_path / "done.json"
    mode, count = "new", 0
    while not done.exists():
        tag = uuid.uuid4().hex
        arguments = [mode, kind, tmp_path, trials, iterations, step]
        command = [sys.executable, "-m", "tests.faults.jobs", *map(str, arguments)]
        environment = {**os.environ, "FLUIDTUNE_TEST_TAG": tag, "PYTHONPATH": str(ROOT)}
        with open(tmp_path / "out.txt", "ab") as out:
            driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
            if count < kills:
                wait_for_progress(tmp_path / "job" / EVENT_LOG_NAME, driver)
                time.sleep(rng.uniform(0.0, 2.0))
                os.kill(driver.pid, signal.SIGKILL)
                driver.wait()
                count += 1
            else:
                assert driver.wait(timeout=300) == 0, (tmp_path / "out.txt").read_text()[-3000:]
        deadline = time.monotonic() + 30
        while tagged(tag):
            assert time.monotonic() < deadline, tagged(tag)
            time.sleep(0.2)
        mode = "restore"
    assert count == kills, "the job was over before it had been killed so often"
    outcome = json.loads(done.read_text())
    assert outcome == {"errors": 0, "iterations": [iterations] * trials}
    check_reports(kind, tmp_path, trials, iterations, tmp_path)


def wait_for_progress(log: Path, driver: subprocess.Popen) -> None:
    """Until this driver has reported an iteration, or is done."""

    def results() -> int:
        return sum(e["event"] == "trial_result" for e in read_events(log)) if log.exists() else 0

    before = results()
    while results() == before and driver.poll() is None:
        time.sleep(0.1)
