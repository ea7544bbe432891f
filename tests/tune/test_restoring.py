"""Ctrl-C, `Tuner.restore` and `Tuner.can_restore`: finished trials are kept, the others go on where they were."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray import tune
from ray.tune.schedulers import HyperBandScheduler

import fluidtune
from tests.faults import jobs
from tests.tune.running import CPUS, events_of, fit, logged
from tests.tune.trainables import raising, with_checkpoints

ROOT = Path(__file__).parents[2]

INTERRUPTED = """
import sys
import ray
from ray import tune
from tests.tune.trainables import with_checkpoints

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tune.Tuner(
        with_checkpoints,
        param_space={"x": tune.grid_search([0, 1, 2, 3]), "n": tune.sample_from(
            lambda config: 3 if config["x"] < 2 else 60), "pause": 0.1},
        tune_config=tune.TuneConfig(metric="score", mode="max"),
        run_config=tune.RunConfig(name="job", storage_path=sys.argv[1], verbose=0),
    ).fit()
    print("ended in order")
"""


BETWEEN = """
import json, os, sys
import ray
from ray import tune
import fluidtune
from fluidtune.ray_compat import whole_files
from tests.tune.trainables import with_checkpoints

write = whole_files.write_whole

def killed(content, files, path):
    content = b"".join([content] if isinstance(content, bytes) else content)
    if os.path.basename(path).startswith("experiment_state-") and len(json.loads(content)["trial_data"]) == 2:
        os._exit(9)
    write(content, files, path)

path, executor = sys.argv[1] + "/job", fluidtune.FluidExecutor(devices="cpu:1")
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
if fluidtune.Tuner.can_restore(path):
    tuner = fluidtune.Tuner.restore(path, with_checkpoints, executor=executor)
else:
    whole_files.write_whole = killed
    tuner = fluidtune.Tuner(
        with_checkpoints,
        param_space={"x": tune.grid_search([0, 1, 2]), "n": 2, "pause": 0.1},
        tune_config=tune.TuneConfig(metric="score", mode="max", max_concurrent_trials=1),
        run_config=tune.RunConfig(name="job", storage_path=sys.argv[1], verbose=0),
        executor=executor,
    )
print("ENDED", sorted(result.metrics["training_iteration"] for result in tuner.fit()))
"""


def reported(path: Path) -> int:
    return sum(log.read_text().count('"trial_result"') for log in path.glob("job/fluid_events.jsonl"))


@pytest.mark.ray
@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.core), signal.SIGKILL]
)
def test_a_signal_leaves_no_process_and_a_run_that_is_restored(number: int, tmp_path: Path, one_ray) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    driver = subprocess.Popen(
        [sys.executable, "-m", "fluidtune", "run", "--devices", "cpu:2", str(script), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while reported(tmp_path) < 15 and time.monotonic() < deadline and driver.poll() is None:
            time.sleep(0.1)
        assert driver.poll() is None, driver.communicate()[0][-3000:]
        below = psutil.Process(driver.pid).children(recursive=True)
        # Ray's own agents may outlive a driver by more than half a minute, under stock Ray Tune as well.
        named = re.compile(r"ray::(Dashboard|RuntimeEnv)Agent|/(dashboard/agent|runtime_env/agent/main)\.py")
        agents = [each for each in below if named.search(" ".join(each.cmdline()))]
        below = [each for each in below if each not in agents]
        driver.send_signal(number)
        said, _ = driver.communicate(timeout=60)
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
    expected = {signal.SIGINT: 0, signal.SIGTERM: 75, signal.SIGKILL: -signal.SIGKILL}[number]
    assert driver.returncode == expected and ("ended in order" in said) == (expected == 0), said[-3000:]
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive, f"left behind: {alive}"
    if number == signal.SIGKILL:  # tests/faults/test_search.py restores such runs
        for each in agents:
            with contextlib.suppress(psutil.Error):
                each.kill()
        return
    assert fluidtune.Tuner.can_restore(str(tmp_path / "job"))
    assert not fluidtune.Tuner.can_restore(str(tmp_path / "another"))

    one_ray.use(num_cpus=2)
    finished = {p: p.stat().st_mtime for p in tmp_path.glob("job/*_x=[01]_*/checkpoint_*")}
    assert len(finished) == 6
    tuner = fluidtune.Tuner.restore(str(tmp_path / "job"), with_checkpoints, executor=CPUS)
    results = tuner.fit()
    assert not results.errors and len(results) == 4
    for result in results:
        last = 3 if result.config["x"] < 2 else 60
        assert result.metrics["training_iteration"] == last
        assert sorted(set(logged(result))) == list(range(1, last + 1))
        if last == 60:
            assert result.metrics["began"] > 0, "it began again instead of going on"
    assert {p: p.stat().st_mtime for p in tmp_path.glob("job/*_x=[01]_*/checkpoint_*")} == finished


@pytest.mark.ray
@pytest.mark.usefixtures("ray2")
@pytest.mark.parametrize("side", ["stock", "fluid"])
def test_an_experiment_goes_on_under_fluidtune_whoever_began_it(side: str, tmp_path: Path) -> None:
    space = {
        "x": tune.grid_search([0, 1, 2]),
        "marker": tune.sample_from(lambda config: str(tmp_path / "marker") if config["x"] == 1 else None),
        "failures": 1,
    }
    fit(side, raising, space, tmp_path, fails=1)
    path = str(tmp_path / side)
    assert fluidtune.Tuner.can_restore(path)
    results = fluidtune.Tuner.restore(path, raising, executor=CPUS, resume_errored=True).fit()
    assert not results.errors
    assert [r.metrics["training_iteration"] for r in results] == [5, 5, 5]
    for result in results:
        assert logged(result) == [1, 2, 3, 4, 5]


class Ending(tune.Callback):
    """Ends the run at a trial's third result, once: as Ctrl-C does, by a notice, or with an exception in the driver."""

    def __init__(self, how: str, marker: Path):
        self.how, self.marker = how, marker

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any) -> None:
        if result["training_iteration"] == 3 and not self.marker.exists():
            self.marker.touch()
            if self.how == "exception":
                raise RuntimeError("as ordered")
            signal.raise_signal(signal.SIGTERM if self.how == "notice" else signal.SIGINT)


@pytest.mark.ray
@pytest.mark.usefixtures("ray2")
@pytest.mark.parametrize("how", ["ctrl-c", "exception", "notice"])
def test_a_run_that_ends_in_the_middle_leaves_its_trial_to_go_on(how: str, tmp_path: Path) -> None:
    space = {"x": 1.0, "iterations": 6, "step": 0.1, "notes": str(tmp_path)}
    executor = fluidtune.FluidExecutor(devices="cpu:2", max_workers=1)
    settings = {"metric": "value", "mode": "min", "run": {"callbacks": [Ending(how, tmp_path / "ended")]}}
    ends: Any = {
        "exception": pytest.raises(Exception, match="as ordered"),
        "notice": pytest.raises(SystemExit, match="75"),
    }
    with ends.get(how, contextlib.nullcontext()):
        fit("fluid", jobs.elastic, space, tmp_path, executor=executor, **settings)
    assert len(list(tmp_path.glob("fluid/*/.fluid_commit"))) == 1
    notices = [len(event["saved"]) for event in events_of(tmp_path, "notice")]
    assert notices == ([1] if how == "notice" else [])
    result = fluidtune.Tuner.restore(str(tmp_path / "fluid"), jobs.elastic, executor=executor).fit()[0]
    ran = [int(line.split()[0]) for line in (tmp_path / "1.0").read_text().splitlines()]
    assert logged(result) == sorted(set(ran)) == [1, 2, 3, 4, 5, 6]
    assert len(ran) <= 7, "one iteration more, which proves the commit"
    assert not list(tmp_path.glob("fluid/*/.fluid_commit"))


@pytest.mark.ray
@pytest.mark.core
def test_trials_that_are_stopped_while_paused_leave_no_commits(ray2: None, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    xs = tune.grid_search([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    space = {"x": xs, "iterations": 4, "step": 0.01, "notes": str(tmp_path / "notes")}
    config = {"metric": "value", "mode": "min", "scheduler": HyperBandScheduler(max_t=4, reduction_factor=2)}
    results = fit("fluid", jobs.elastic, space, tmp_path, **config)
    assert len(results) == 6
    assert min(result.metrics["training_iteration"] for result in results) < 4, "none was stopped while it was paused"
    assert not list(tmp_path.glob("fluid/*/.fluid_commit"))


@pytest.mark.ray
@pytest.mark.usefixtures("no_ray")
def test_a_driver_killed_between_the_searchers_state_and_the_trials(tmp_path: Path) -> None:
    """Seen: the searcher waited for the end of a trial that Tune had never saved, and the restored run never ended."""
    command = [sys.executable, "-c", BETWEEN, str(tmp_path)]
    runs = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120) for _ in range(2)]
    assert [each.returncode for each in runs] == [9, 0] and "ENDED [2, 2, 2]" in runs[1].stdout, runs[1].stderr[-3000:]
