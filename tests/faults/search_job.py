"""A driver to kill: one search, by one of eight settings of Tune's algorithms."""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import tune
from ray.tune import schedulers
from ray.tune.schedulers.pb2 import PB2
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.optuna import OptunaSearch

import fluidtune
from fluidtune import elastic
from tests.elastic.restarts import store_in
from tests.ray_compat.algorithm_states import scores_of

#: Iterations after which a trial ends by itself.
LAST = 8


def score(config: Mapping[str, Any], epoch: int, before: float) -> float:
    """Depends on all epochs before, and on the configurations that they had. The epoch is noted as done."""
    time.sleep(random.SystemRandom().uniform(0.0, 0.04))
    with open(config["notes"], "a") as file:
        file.write(f"{tune.get_context().get_trial_id()} {epoch} {os.getpid()}\n")
    return float(0.5 * before + config["lr"] + random.Random(f"{config['x']:.6f} {epoch}").random())


def committing(config: dict[str, Any]) -> None:
    kept = elastic.state(score=0.0)
    for epoch in elastic.epochs(0, LAST):
        kept.score = score(config, epoch, kept.score)
        tune.report({"score": kept.score, "lr": config["lr"]})


def checkpointing(config: dict[str, Any]) -> None:
    first, value = 0, 0.0
    if (found := tune.get_checkpoint()) is not None:
        with found.as_directory() as folder:
            first, value = json.loads((Path(folder) / "state").read_text())
    for epoch in range(first, LAST):
        value = score(config, epoch, value)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "state").write_text(json.dumps([epoch + 1, value]))
            tune.report({"score": value, "lr": config["lr"]}, checkpoint=tune.Checkpoint.from_directory(folder))


class Pausing(OptunaSearch):
    """Hears of pauses, as BOHB's own searcher does."""

    def on_pause(self, trial_id: str) -> None: ...

    def on_unpause(self, trial_id: str) -> None: ...


class Shown(schedulers.ASHAScheduler):
    """Writes the scores in its rungs beside each trial, whenever one has ended."""

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        super().on_trial_complete(tune_controller, trial, result)
        Path(trial.config["notes"]).with_name("rungs").write_text(json.dumps(scores_of(self)))


GRID = {"x": tune.grid_search([float(x) for x in range(9)]), "lr": 0.1}
DRAWN = {"x": tune.uniform(0.0, 9.0), "lr": tune.uniform(0.0, 1.0)}
POPULATION = {"x": tune.grid_search([0.0, 1.0, 2.0, 3.0]), "lr": tune.sample_from(lambda config: 0.1 + config["x"] / 9)}
HALVES = {"max_t": LAST, "reduction_factor": 2}
COUNTED = {"time_attr": "training_iteration"}
POPULATED = {**COUNTED, "perturbation_interval": 2}
#: The trainable, the space, the scheduler, and what else `TuneConfig` has. Trials run one at a time, but for "several".
SEARCHES: dict[str, tuple[Any, dict[str, Any], Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "asha": (committing, GRID, lambda: schedulers.ASHAScheduler(**HALVES), lambda: {"max_concurrent_trials": 1}),
    "several": (committing, GRID, lambda: Shown(**HALVES), dict),
    "median": (
        committing,
        GRID,
        lambda: schedulers.MedianStoppingRule(**COUNTED, grace_period=2, min_samples_required=2),
        lambda: {"max_concurrent_trials": 1},
    ),
    "optuna": (
        committing,
        DRAWN,
        lambda: schedulers.ASHAScheduler(**HALVES),
        lambda: {"search_alg": OptunaSearch(seed=3), "num_samples": 14, "max_concurrent_trials": 1},
    ),
    "hyperband": (checkpointing, GRID, lambda: schedulers.HyperBandScheduler(**HALVES), dict),
    "bohb": (
        checkpointing,
        DRAWN,
        lambda: schedulers.HyperBandForBOHB(**HALVES),
        lambda: {"search_alg": ConcurrencyLimiter(Pausing(seed=3), max_concurrent=1), "num_samples": 9},
    ),
    "pbt": (
        checkpointing,
        POPULATION,
        lambda: schedulers.PopulationBasedTraining(**POPULATED, hyperparam_mutations={"lr": tune.uniform(0.0, 1.0)}),
        dict,
    ),
    "pb2": (checkpointing, POPULATION, lambda: PB2(**POPULATED, hyperparam_bounds={"lr": [0.0, 1.0]}), dict),
}


def search(name: str, storage: Path, address: str) -> None:
    """Begin the search of this name in the cluster at this address, or go on with it."""
    ray.init(address=address, log_to_driver=False)
    trainable, space, scheduler, more = SEARCHES[name]
    executor = fluidtune.FluidExecutor(devices="cpu:3" if name == "several" else "cpu:1", max_workers=1)
    path = str(storage / "job")
    if fluidtune.Tuner.can_restore(path):
        tuner = fluidtune.Tuner.restore(path, trainable, executor=executor)
    else:
        random.seed(1)
        np.random.seed(1)
        tuner = fluidtune.Tuner(
            trainable,
            param_space={**space, "notes": str(storage / "notes")},
            tune_config=tune.TuneConfig(metric="score", mode="max", scheduler=scheduler(), **more()),
            run_config=tune.RunConfig(name="job", storage_path=str(storage), verbose=0),
            executor=executor,
        )
    assert not tuner.fit().errors


def outcome(storage: Path) -> dict[str, Any]:
    """What each trial has reported, by its number: iterations, scores and configurations. Or what ASHA's rungs lack."""
    found: dict[str, Any] = {}
    by_id = {}
    for path in storage.glob("job/*/result.json"):
        if lines := [json.loads(line) for line in path.read_text().splitlines()]:
            (number,) = re.findall(r"_(\d+)_(?:lr|x)=", path.parent.name)
            assert number not in found, f"there are two trials {number}"
            found[number] = [(line["training_iteration"], line["score"], line["lr"]) for line in lines]
            by_id[lines[0]["trial_id"]] = {row[0]: row[1] for row in found[number]}
    if not (storage / "rungs").exists():
        return found
    rungs = json.loads((storage / "rungs").read_text())
    reported = {at: {name: told[int(at)] for name, told in by_id.items() if int(at) in told} for at in rungs}
    assert all(list(told) == [*range(1, len(told) + 1)] for told in by_id.values()), "one is missing, or came twice"
    return {at: (rungs[at], reported[at]) for at in rungs if rungs[at] != reported[at]}


def note_end(storage: Path) -> None:
    """A driver has ended: the notes get how many iterations each trial's newest commit holds."""
    commits = [store_in(folder).load() for folder in storage.glob("job/*/.fluid_commit")]
    with (storage / "notes").open("a") as file:
        file.write(json.dumps({commit.trial: commit.iteration for commit in commits if commit is not None}) + "\n")


def done_again(storage: Path) -> dict[str, Counter[bool]]:
    """By trial and process, how many iterations it did that had been done; True: those that the newest commit held."""
    again: dict[str, Counter[bool]] = defaultdict(Counter)
    held: dict[str, int] = {}
    done = set()
    for line in (storage / "notes").read_text().splitlines():
        if line.startswith("{"):
            held = json.loads(line)
            continue
        trial, epoch, process = line.split()
        if (trial, epoch) in done:
            again[f"{trial} {process}"][int(epoch) < held.get(trial, 0)] += 1
        done.add((trial, epoch))
    return again
