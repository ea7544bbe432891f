"""Trials that a user stops, keeps and clones end as under stock Ray Tune, under each algorithm and after a restore."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, PopulationBasedTraining

import fluidtune
from fluidtune.report import EVENT_LOG_NAME, read_events
from fluidtune.report.story import story_of
from fluidtune.steering.steering_files import SteeringRefused, ask
from tests.contracts.processes import python, until
from tests.steering.test_steering_files import ME
from tests.tune.running import events_of, fit, logged, outcome
from tests.tune.trainables import Stepper, score

pytestmark = [pytest.mark.ray, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
STEERED = fluidtune.FluidExecutor(devices="cpu:2", steer=True)
XS = [0, 1, 2, 3]


class Gated(Stepper):
    """Waits before its second iteration until there is a file. ``lr`` is added to each score."""

    def step(self) -> dict[str, Any]:
        until(lambda: self.at != 1 or Path(self.config["gate"]).exists(), 150)
        result = super().step()
        return {**result, "score": result["score"] + self.config.get("lr", 0), "lr": self.config.get("lr", 0)}


#: All four trials run at once.
HALF = tune.with_resources(Gated, {"cpu": 0.5})


def trial_of(run: Path, x: Any, has: str = "trial_result") -> str:
    """The id of the trial with this x, as soon as it has a result, or another event."""

    def found() -> str | None:
        events = read_events(run / EVENT_LOG_NAME) if (run / EVENT_LOG_NAME).exists() else []
        added = {e["trial"]: (e.get("parameters") or {}).get("x") for e in events if e["event"] == "trial_added"}
        return next((e["trial"] for e in events if e["event"] == has and added.get(e["trial"]) == x), None)

    return str(until(found, 150))


@contextmanager
def meanwhile(do: Callable[[], None], gate: Path) -> Iterator[None]:
    """Do this beside what is inside, then open the gate; fail if it fails."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            do()
        except BaseException as error:
            failed.append(error)
        finally:
            gate.touch()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()
    assert not failed, failed


def until_two_of_x1(trial_id: str, result: dict[str, Any]) -> bool:
    """The stopper of stock Tune's run: x=1 ends at its second result, and every trial after six."""
    return bool(result["training_iteration"] >= (2 if result["config"]["x"] == 1 else 6))


def until_six(trial_id: str, result: dict[str, Any]) -> bool:
    return bool(result["training_iteration"] >= 6)


def shifted(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "x": config["x"] + 0.25}


ALGORITHMS: dict[str, Callable[[], Any]] = {
    "hyperband": lambda: HyperBandScheduler(max_t=9, reduction_factor=3),
    "pbt": lambda: PopulationBasedTraining(
        "training_iteration", perturbation_interval=3, custom_explore_fn=shifted, synch=True
    ),
}


@pytest.mark.usefixtures("ray2")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_stopped_and_a_cloned_trial_end_as_under_stock_tune(algorithm: str, tmp_path: Path) -> None:
    """Stock Tune's run has the clone as one more trial, and a stopper that ends the stopped one."""
    gate = tmp_path / "gate"
    run = tmp_path / "fluid"

    def steer() -> None:
        stopped = trial_of(run, 1)
        ask(run, "stop", stopped)
        assert "is a clone of" in ask(run, "clone", trial_of(run, 0), ["x=8"])

    space = {"gate": str(gate)}
    settings = {"stop": until_six}
    with meanwhile(steer, gate):
        fluid = fit(
            *("fluid", HALF, {**space, "x": tune.grid_search(XS)}, tmp_path),
            scheduler=ALGORITHMS[algorithm](),
            executor=STEERED,
            run=settings,
        )
    stock = fit(
        *("stock", HALF, {**space, "x": tune.grid_search([*XS, 8])}, tmp_path),
        scheduler=ALGORITHMS[algorithm](),
        run={"stop": until_two_of_x1},
    )
    assert outcome(fluid) == outcome(stock)
    states = [(e["kind"], e["state"]) for e in events_of(tmp_path, "steered")]
    assert states.count(("stop", "done")) == 1 and states.count(("clone", "done")) == 1


@pytest.mark.usefixtures("ray2")
def test_a_kept_trial_goes_on_though_asha_wants_to_stop_it(tmp_path: Path) -> None:
    """ASHA stops the last one of a rung; kept, it trains to the run's own end. The rungs are as if it had ended."""
    run, gate = tmp_path / "fluid", tmp_path / "gate"

    def steer() -> None:
        weak = trial_of(run, 0)
        assert "goes on" in ask(run, "keep", weak)
        with pytest.raises(SteeringRefused, match="kept already"):
            ask(run, "keep", weak)

    def asha() -> ASHAScheduler:
        return ASHAScheduler(max_t=6, grace_period=2, reduction_factor=2, stop_last_trials=False)

    space = {"x": tune.grid_search([4, 3, 2, 0]), "gate": str(gate)}
    with meanwhile(steer, gate):
        fluid = fit("fluid", HALF, space, tmp_path, scheduler=asha(), executor=STEERED, run={"stop": until_six})
    ends = {x: iteration for x, iteration, _ in outcome(fluid)}
    assert ends[0] == 6
    told = story_of(events_of(tmp_path), trial_of(run, 0))
    assert any("asked that it goes on when the algorithm wants to stop it" in line for line in told.lines())


class Silent(Stepper):
    """With x=0 it reports nothing."""

    def step(self) -> dict[str, Any]:
        while not self.config["x"]:
            time.sleep(1)
        return super().step()


@pytest.mark.usefixtures("ray2")
def test_a_trial_that_reports_nothing_is_stopped_too(tmp_path: Path) -> None:
    run, gate = tmp_path / "fluid", tmp_path / "gate"

    def steer() -> None:
        assert "ends at its next result" in ask(run, "stop", trial_of(run, 0, has="trial_started"))

    trainable, space = tune.with_resources(Silent, {"cpu": 1}), {"x": tune.grid_search([0, 1])}
    with meanwhile(steer, gate):
        fluid = fit("fluid", trainable, space, tmp_path, executor=STEERED, run={"stop": until_six})
    (ended,) = [e for e in events_of(tmp_path, "trial_ended") if e["trial"] in fluid[0].path]
    assert ended["ending"] == "stopped" and not logged(fluid[0])


KILLED = """
import sys
import ray
from ray import tune
from ray.tune.search.optuna import OptunaSearch
from tests.tune.test_steering import XS, Gated

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    path = sys.argv[1]
    search = OptunaSearch(points_to_evaluate=[{"x": x} for x in XS])
    tune.Tuner(
        tune.with_resources(Gated, {"cpu": 0.5}),
        param_space={"x": tune.randint(0, 9), "gate": path + "/gate"},
        tune_config=tune.TuneConfig(
            metric="score", mode="max", num_samples=len(XS), search_alg=search, max_concurrent_trials=len(XS)),
        run_config=tune.RunConfig(
            name="fluid", storage_path=path, verbose=0, stop={"training_iteration": 6},
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1)),
    ).fit()
"""


def test_a_driver_that_is_killed_after_its_answer_loses_nothing_and_does_nothing_twice(
    tmp_path: Path, no_ray: Any, one_ray: Any, capfd: Any
) -> None:
    """The script is not edited. The clone goes on from its checkpoint; the stop was asked for and had not come."""
    script, run = tmp_path / "script.py", tmp_path / "fluid"
    script.write_text(KILLED)
    command = [sys.executable, "-m", "fluidtune", "run", "--steer", "--devices", "cpu:2", str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)

    try:
        stopped, cloned = trial_of(run, 1), trial_of(run, 2)
        until(lambda: list(run.glob(f"*{cloned}*/checkpoint_*/at.json")), 150)
        python("-m", "fluidtune", "trial", "stop", str(run), stopped)
        said = python("-m", "fluidtune", "trial", "clone", str(run), cloned, "--set", "x=7", "--from-checkpoint")
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    clone = re.match(r"trial (\w+) is a clone of", said)[1]  # type: ignore[index]
    one_ray.use(num_cpus=2)
    (tmp_path / "gate").touch()
    results = fluidtune.Tuner.restore(str(run), HALF).fit()
    assert not results.errors
    by_id = {result.metrics["trial_id"]: result for result in results}
    assert len(by_id) == len(results) == 5
    own, ended = by_id[clone], by_id[stopped]
    assert (ended.config["x"], ended.metrics["training_iteration"]) == (1, 2)
    assert own.config["x"] == 7 and own.metrics["score"] == score(7, own.metrics["training_iteration"])
    assert {result.metrics["training_iteration"] for result in results if result is not ended} == {6}
    assert logged(own) == [2, 3, 4, 5, 6] and "Remote file not found" not in capfd.readouterr().err
    told = python("-m", "fluidtune", "why", str(run), clone)
    assert f"is a clone of trial {cloned} from its last checkpoint with x=7, for {ME} (command line)" in told
