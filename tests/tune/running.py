"""Runs the same job under stock Ray Tune or under FluidTune, and reads the outcome in one form for both."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.tune import Callback, RunConfig, TuneConfig

import fluidtune
from fluidtune.report import EVENT_LOG_NAME, read_events
from tests.contracts.processes import python

ROOT = Path(__file__).parents[2]
#: How a script is run under stock Ray Tune, and under FluidTune.
BOTH_WAYS = (("stock", [sys.executable]), ("ours", [sys.executable, "-m", "fluidtune", "run"]))
#: Seconds after which stock Ray Tune is held to hang. Judgement: its jobs here take some ten seconds.
BUDGET_S = 100.0
CPUS = fluidtune.FluidExecutor(devices="cpu:2")


class Recorder(Callback):
    """A callback that records its calls in order: (kind of call, x of the trial, iteration)."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any, int | None]] = []

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.heard.append(("start", trial.config["x"], None))

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any) -> None:
        # PBT may have given the trial another configuration in the meantime.
        self.heard.append(("result", result.get("config", trial.config)["x"], result["training_iteration"]))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.heard.append(("complete", trial.config["x"], None))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.heard.append(("error", trial.config["x"], None))

    def of(self, x: Any) -> list[tuple[str, int | None]]:
        return [(what, iteration) for what, whose, iteration in self.heard if whose == x]

    def iterations(self) -> dict[Any, list[int]]:
        told: dict[Any, list[int]] = {}
        for what, x, iteration in self.heard:
            if what == "result" and iteration is not None:
                told.setdefault(x, []).append(iteration)
        return told


def patient(trainable: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Make stock Tune wait for 120 s, and not for 2 s, until the function ends whose process it reuses.

    Where the machine stops that process for 2 s, stock Tune fails the next trial, and its HyperBandScheduler then never
    resumes the trials of that bracket: ``fit`` does not return.
    """

    @functools.wraps(trainable)
    def patiently(config: dict[str, Any]) -> None:
        os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = "120"
        trainable(config)

    return patiently


def stock(trainable: Any, space: dict[str, Any], config: dict[str, Any], run: dict[str, Any]) -> Any:
    """Run a Tuner of stock Ray Tune, once more if it did not end by itself.

    Once in some hundred runs its HyperBandScheduler leaves a trial paused for ever that was saving while its bracket
    was halved, and ``fit`` does not return.
    """
    for _ in range(2):
        own = {name: copy.deepcopy(value) for name, value in config.items()}
        ends = time.monotonic() + BUDGET_S
        results = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=TuneConfig(time_budget_s=BUDGET_S, **own),
            run_config=RunConfig(**{**run, "callbacks": [*run.get("callbacks", ())]}),  # to which Tune adds its own
        ).fit()
        if time.monotonic() < ends:
            return results
        print(f"stock Ray Tune did not end within {BUDGET_S} s; its trials: {results}")
        shutil.rmtree(Path(run["storage_path"]) / run["name"])
        for callback in run.get("callbacks", ()):
            if isinstance(callback, Recorder):
                callback.heard.clear()
    pytest.fail("stock Ray Tune ended in neither of two attempts")


def fit(
    side: str,
    trainable: Any,
    space: dict[str, Any],
    path: Path,
    *,
    executor: fluidtune.FluidExecutor | None = None,
    run: dict[str, Any] | None = None,
    fails: int = 0,
    **config: Any,
) -> Any:
    """Run a Tuner, of which so many trials fail.

    ``side`` is "stock" or "fluid"; ``config`` goes to TuneConfig and ``run`` to RunConfig.
    """
    config.setdefault("metric", "score")
    config.setdefault("mode", "max")
    run = {"name": side, "storage_path": str(path), "verbose": 0, **(run or {})}
    if side == "stock":
        # Its processes are kept from trial to trial: this changes no decision, and tests are quicker.
        config.setdefault("reuse_actors", True)
        if not isinstance(trainable, type):
            trainable = patient(trainable)
        results = stock(trainable, space, config, run)
    else:
        results = fluidtune.Tuner(
            trainable,
            param_space=space,
            tune_config=TuneConfig(**config),
            run_config=RunConfig(**run),
            executor=executor or CPUS,
        ).fit()
    assert results.num_errors == fails, results.errors
    return results


def outcome(results: Any, *metrics: str) -> list[tuple[Any, ...]]:
    """(x, last iteration, score, further metrics) of every trial, in the order of the ResultGrid."""
    return [
        (
            result.config["x"],
            result.metrics.get("training_iteration"),
            result.metrics.get("score"),
            *(result.metrics.get(metric) for metric in metrics),
        )
        for result in results
    ]


def events_of(path: Path, *names: str) -> list[dict[str, Any]]:
    """The events of the log of `fit` under ``path``: all, or those of these names."""
    found = read_events(path / "fluid" / EVENT_LOG_NAME)
    return [event for event in found if not names or event["event"] in names]


def logged(result: Any) -> list[int]:
    """The iterations in a trial's result.json, in the file's order."""
    lines = (Path(result.path) / "result.json").read_text().splitlines()
    return [json.loads(line)["training_iteration"] for line in lines]


def forks_ready(seconds: float = 60.0) -> None:
    """Wait until processes of jobs on cores are forked: a job does not wait for that."""
    from fluidtune import hash_seed
    from fluidtune.cluster.forks.nodes import ONE_THREAD, ForkServers
    from fluidtune.cluster.new_processes import worker_environment

    context = ray.get_runtime_context()
    servers, node = ForkServers(worker_environment(), ONE_THREAD), context.get_node_id()
    servers.prepare(node, hash_seed.runtime_env(1, dict(context.runtime_env), {}) or {})
    until = time.monotonic() + seconds
    while servers.command(node) is None:
        assert servers.off is None and time.monotonic() < until, servers.off
        time.sleep(0.1)


def run_both_ways(script: Sequence[str], storage: Callable[[str], list[str]], pattern: str) -> list[str]:
    """What the script prints by the pattern, first under stock Ray Tune. ``storage``: its last arguments."""
    found = []
    for name, command in BOTH_WAYS:
        found += re.findall(pattern, python(*script, *storage(name), by=command, cwd=ROOT))
    assert len(found) == 2, found
    return found
