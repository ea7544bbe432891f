"""A finished run whose models multiply, for the tests of serving."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ray import tune
from ray.tune import Checkpoint

import fluidtune
from fluidtune.report import read_events

#: Inputs with which the model fails, and ends its process.
FAILS, KILLS = -1, 13


def tuned(storage: Path, name: str, train: Callable, **space: list):
    """Run a trial for each of these values under FluidTune, in the Ray cluster that this process is connected to."""
    return fluidtune.Tuner(
        train,
        param_space={key: tune.grid_search(values) for key, values in space.items()},
        tune_config=tune.TuneConfig(metric="score", mode="max"),
        run_config=tune.RunConfig(name=name, storage_path=str(storage)),
        executor=fluidtune.FluidExecutor(devices="cpu:1"),
    ).fit()


def train(config):
    """Reports its factor; a trial with factor 0 fails."""
    if config["factor"] == 0:
        raise ValueError("this trial fails")
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "factor.json").write_text(json.dumps(config["factor"]))
        tune.report({"score": config["factor"]}, checkpoint=Checkpoint.from_directory(directory))


def run(storage: Path) -> Path:
    """Run trials with factors 2, 3 and 0."""
    tuned(storage, "factors", train, factor=[2, 3, 0])
    return storage / "factors"


def logged(run: Path):
    """The events of the run's service."""
    return read_events(run / "serving" / "fluid_events.jsonl")


def factors(run: Path) -> dict[str, int]:
    """The factor of each trial of the run, by its id."""
    return {one.trial_id: one.config["factor"] for one in tune.ExperimentAnalysis(str(run)).trials}


def load(directory, config):
    """Multiplies numbers by the factor in the checkpoint."""
    factor = json.loads(Path(directory, "factor.json").read_text())
    assert factor == config["factor"]

    def multiply(numbers):
        if KILLS in numbers:
            os._exit(1)
        if FAILS in numbers:
            raise ValueError("a negative number")
        return [factor * number for number in numbers]

    multiply.samples = [1, 2.5]
    return multiply


#: What a trial of `kinds` is, and what becomes of its deploy.
KINDS = ("first", "second", "slow", "other form", "broken", "hangs")


def kinds(storage: Path) -> tuple[Path, dict[str, str]]:
    """A run with a trial of each of `KINDS`, of which "first" is best; and by kind, the trial's id."""

    def train_kind(config):
        with tempfile.TemporaryDirectory() as directory:
            if config["kind"] != "broken":
                Path(directory, "kind").write_text(config["kind"])
            score = -KINDS.index(config["kind"])
            tune.report({"score": score}, checkpoint=Checkpoint.from_directory(directory))

    found = tuned(storage, "kinds", train_kind, kind=list(KINDS))
    return storage / "kinds", {one.config["kind"]: one.metrics["trial_id"] for one in found}


def load_kind(directory, config):
    """Answers a number with the trial's kind."""
    kind = Path(directory, "kind").read_text()
    while kind == "hangs":
        time.sleep(0.1)

    def answer(values):
        if kind == "slow":
            time.sleep(6.0)
        return [kind] * len(values)

    answer.samples = [[1]] if kind == "other form" else [1, 2.5]
    return answer
