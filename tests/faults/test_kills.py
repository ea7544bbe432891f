"""Real processes are killed at random moments: no result is lost or reported twice, and no process is left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from ray import tune

import fluidtune
from fluidtune.report import EVENT_LOG_NAME, read_events
from tests.faults import jobs
from tests.leftovers import belongs_to

pytestmark = [pytest.mark.ray, pytest.mark.faults]

ROOT = Path(__file__).resolve().parents[2]
KILLS = 20


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
        assert [line["training_iteration"] for line in lines] == list(range(1, iterations + 1)), x
        expected = undisturbed(kind, x, iterations, tmp / "undisturbed")
        assert [line["value"] for line in lines] == pytest.approx(expected, rel=1e-4), x


def busy_workers(events: list[dict]) -> list[int]:
    """Process ids of living workers that have completed an iteration.

    Workers that die again and again while they start are counted as the trial's own failures.
    """
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
    """Kills a worker of the job `KILLS` times, each at a random moment after progress."""

    def __init__(self, log: Path, seed: str):
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


#: Ray's own agents. They may outlive a killed driver by more than half a minute, under stock Tune as well.
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def left_by_driver(directory: Path) -> list[psutil.Process]:
    """Processes that the driver with this TMPDIR started and left. When only Ray's agents are left, they are killed."""
    found, agents = [], []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and belongs_to(process, directory):
                (agents if process.name() in RAYS_AGENTS else found).append(process)
    if not found:
        for agent in agents:
            with contextlib.suppress(psutil.Error):
                agent.kill()
    return found


def start_driver(
    mode: str, kind: str, storage: Path, size: tuple[int, int, float], directory: Path
) -> subprocess.Popen:
    """A driver process with a Ray cluster of its own below ``directory``, whose path must be short: Ray's sockets."""
    command = [sys.executable, "-m", "tests.faults.jobs", mode, kind, str(storage), *map(str, size)]
    environment = {**os.environ, "TMPDIR": str(directory), "PYTHONPATH": str(ROOT)}
    with open(storage / "out.txt", "ab") as out:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)


def wait_until_gone(directory: Path) -> None:
    deadline = time.monotonic() + 30
    while left := left_by_driver(directory):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def said(storage: Path) -> str:
    return (storage / "out.txt").read_text()[-3000:]


def outcome_of(storage: Path) -> dict:
    return json.loads((storage / "done.json").read_text())


def all_kinds(play: Callable[[str, Path], None], kinds: Iterable[str], tmp_path: Path) -> None:
    """Play all kinds at once, each in a folder and with processes of its own: they wait most of the time."""
    with ThreadPoolExecutor() as threads:
        running = []
        for kind in kinds:
            (tmp_path / kind).mkdir()
            running.append(threads.submit(play, kind, tmp_path / kind))
    for each in running:
        each.result()


#: Trials, iterations of each, and seconds of an iteration. At first there is one trial more than there are devices. At
#: the end there are fewer, so elastic trials grow wide. A plain trial begins anew after each kill, so there are many
#: short ones.
KILLED_WORKERS = {"elastic": (3, 150, 0.1), "checkpointing": (3, 150, 0.1), "plain": (24, 40, 0.05)}


def kill_workers(kind: str, storage: Path) -> None:
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    killer = Killer(storage / "job" / EVENT_LOG_NAME, seed=kind)
    killer.start()
    try:
        driver = start_driver("new", kind, storage, KILLED_WORKERS[kind], directory)
        assert driver.wait(timeout=400) == 0, said(storage)
    finally:
        killer.over = True
        driver.kill()
    killer.join()
    assert killer.kills == KILLS, kind
    wait_until_gone(directory)


@pytest.mark.timeout(480)
@pytest.mark.usefixtures("no_ray")
def test_workers_killed_20_times_at_random_moments(tmp_path):
    all_kinds(kill_workers, KILLED_WORKERS, tmp_path)
    for kind, (trials, iterations, _) in KILLED_WORKERS.items():
        assert outcome_of(tmp_path / kind) == {"errors": 0, "iterations": [iterations] * trials}
        check_reports(kind, tmp_path / kind, trials, iterations, tmp_path)
        lost = sum(e["event"] == "worker_lost" for e in read_events(tmp_path / kind / "job" / EVENT_LOG_NAME))
        # The loss of an idle worker is noticed only when a trial needs it.
        assert lost >= KILLS // 2, kind


DRIVER_KILLS = 10
#: Trials, iterations of each, and seconds of an iteration of the jobs whose drivers are killed.
KILLED_DRIVERS = (4, 120, 0.1)
#: A driver is killed after up to so many results since its first one: two trials make them in 2 s.
MOST_RESULTS = 40


def kill_drivers(kind: str, storage: Path) -> None:
    rng = random.Random(f"{kind} {DRIVER_KILLS}")
    log, mode, kills = storage / "job" / EVENT_LOG_NAME, "new", 0
    while not (storage / "done.json").exists():
        directory = Path(tempfile.mkdtemp(prefix="d-"))
        driver = start_driver(mode, kind, storage, KILLED_DRIVERS, directory)
        if kills < DRIVER_KILLS:
            wait_for_results(log, 1 + rng.randrange(MOST_RESULTS), driver)
            driver.kill()
            driver.wait()
            kills += 1
        else:
            assert driver.wait(timeout=300) == 0, said(storage)
        wait_until_gone(directory)
        mode = "restore"
    assert kills == DRIVER_KILLS, "the job was over before it had been killed so often"


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("no_ray")
def test_drivers_killed_at_random_moments(tmp_path):
    kinds, (trials, iterations, _) = ("elastic", "checkpointing"), KILLED_DRIVERS
    all_kinds(kill_drivers, kinds, tmp_path)
    for kind in kinds:
        assert outcome_of(tmp_path / kind) == {"errors": 0, "iterations": [iterations] * trials}
        check_reports(kind, tmp_path / kind, trials, iterations, tmp_path)


def wait_for_results(log: Path, more: int, driver: subprocess.Popen) -> None:
    """Wait until this driver has reported so many iterations or has ended."""

    def results() -> int:
        return sum(e["event"] == "trial_result" for e in read_events(log)) if log.exists() else 0

    before = results()
    while results() < before + more and driver.poll() is None:
        time.sleep(0.05)
