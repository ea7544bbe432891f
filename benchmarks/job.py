"""The tuning job of several benchmarks: a stock Ray Tune script, run by ``python`` or by ``fluidtune run``.

It searches over the digits network of examples/ (`elastic` and `plain` are the same loop), over small perceptrons
(`small`), over trials of a given length that train nothing (`sleep`), or over an emulated task on emulated GPUs
(`emulated`). Under stock Ray Tune ``--pace`` makes an emulated iteration last as long as the profile says. Every side
has the same configurations.

The script writes down the best metric, the iterations, the seconds of ``fit``, and the launch of each trial: the
seconds from the moment when a place to run became free for it until its first result arrived. N cores are N places.
They are free for the first N trials when ``fit`` begins. A later trial gets the place of a trial that is complete: the
k-th trial in the order of first results takes the place of the (k-N)-th in the order of completion. By then Tune has
long decided which trial is next, and the same Tune callback sees both moments on every side. Launches are measured for
`grid` only, because a trial that pauses gives its place up unseen, and not on emulated devices, where one place may
hold several trials.

It also writes down the seconds from the start of its process until Ray was up and until the first result, and what the
processes had computed by then (first_result.py).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

import ray
from ray import tune

from benchmarks.algorithms import ALGORITHMS, algorithm, budget
from benchmarks.emulated_task import EmulatedTask, emulated_space
from benchmarks.first_result import age, spent
from benchmarks.stock_host import paced_on_stock
from fluidtune.cluster.emulated import Emulation
from fluidtune.profiles import Profile


class Watch(tune.Callback):
    """Notes when ``fit`` began, when each trial's first result came, and when each trial ended (unix seconds).

    ``until_first``: what the job had spent when the first result of all came, see first_result.py.
    """

    def __init__(self) -> None:
        self.begun = time.time()
        self.first: dict[str, float] = {}
        self.complete: list[float] = []
        self.until_first: dict[str, float] = {}

    def setup(self, **info: Any) -> None:
        self.begun = time.time()

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        self.first.setdefault(trial.trial_id, time.time())
        if not self.until_first:
            self.until_first = {"first_result_seconds": age(), **spent()}

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self.complete.append(time.time())

    def launches(self, places: int) -> list[float]:
        """The seconds of each trial from a free place to its first result, in the order of first results."""
        free = [self.begun] * places + sorted(self.complete)
        return [first - chosen for first, chosen in zip(sorted(self.first.values()), free, strict=False)]


def sleeper(config: dict[str, Any]) -> None:
    """A trial of a given number of seconds that trains nothing."""
    for step in range(config["steps"]):
        time.sleep(config["seconds"] / config["steps"])
        tune.report({"accuracy": config["index"] / 1000 + step / config["steps"]})


def digits_space(epochs: int) -> dict[str, Any]:
    """The search space of examples/digits_*.py."""
    return {
        "lr": tune.loguniform(1e-3, 3e-1),
        "momentum": tune.uniform(0.5, 0.95),
        "width": tune.choice([32, 64, 96]),
        "batch_size": tune.choice([64, 128]),
        "epochs": epochs,
        "seed": 0,
    }


def emulated_trainable(args: argparse.Namespace) -> Any:
    """The emulated task, with one emulated GPU per trial."""
    task: Any = EmulatedTask
    if args.pace:
        board = tempfile.mkdtemp(prefix="fluidtune-emulated-", dir=args.storage)
        task = paced_on_stock(task, Emulation(Profile.load(args.profile), board))
    return tune.with_resources(task, {"cpu": 0, "gpu": 1})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A tuning job to measure.")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="hyperband")
    parser.add_argument("--trainable", choices=["elastic", "plain", "small", "sleep", "emulated"], default="elastic")
    parser.add_argument("--address", default="local", help="address of a Ray cluster; without it one is started")
    parser.add_argument("--name", default="job", help="name of the experiment")
    parser.add_argument("--cpus", type=int, required=True, help="CPUs of the Ray cluster")
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=9, help="limit of epochs of one trial")
    parser.add_argument("--steps", type=int, default=2, help="results of a sleeping trial")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a sleeping trial")
    parser.add_argument("--gpus", type=int, default=0, help="emulated GPUs of the Ray cluster")
    parser.add_argument("--profile", help="file with the profile of the emulated devices")
    parser.add_argument("--pace", action="store_true", help="make iterations last as long as the profile says")
    parser.add_argument("--reuse", action="store_true", help="Tune's reuse_actors")
    parser.add_argument("--storage", required=True, help="where Tune keeps the results")
    parser.add_argument("--out", required=True, help="where the measurements go, JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    space: dict[str, Any]
    if args.trainable == "sleep":
        trainable, samples = sleeper, 1
        space = {
            "index": tune.grid_search(list(range(args.trials))),
            "steps": args.steps,
            "seconds": args.seconds,
        }
    elif args.trainable == "emulated":
        trainable, samples, space = emulated_trainable(args), args.trials, emulated_space()
    elif args.trainable == "small":
        from benchmarks.small_task import small_space, train

        trainable, samples, space = train, args.trials, small_space(args.epochs)
    else:
        if args.trainable == "elastic":
            from examples.digits_elastic import train
        else:
            from examples.digits_hyperband import train
        trainable, samples, space = train, args.trials, digits_space(args.epochs)
    scheduler, searcher = algorithm(args.algorithm, args.epochs, space)
    # Loops over the digits and sleeping trials end by themselves.
    stop = budget(args.algorithm, args.epochs) if args.trainable == "emulated" else None
    watch = Watch()
    if args.reuse:
        # Stock fails a trial whose process was stopped for 2 s, the default, while it was given that trial, and its
        # HyperBand then waits for ever. The processes of a new cluster inherit the variable.
        os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "120")
    new = {"num_cpus": args.cpus, "num_gpus": args.gpus, "include_dashboard": False} if args.address == "local" else {}
    ray.init(address=args.address, log_to_driver=False, **new)
    ray_up = age()
    tuner = tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=samples,
            scheduler=scheduler,
            search_alg=searcher,
            **({"reuse_actors": True} if args.reuse else {}),
        ),
        run_config=tune.RunConfig(name=args.name, storage_path=args.storage, verbose=0, callbacks=[watch], stop=stop),
    )
    started = time.time()
    grid = tuner.fit()
    measured = {
        "fit_seconds": time.time() - started,
        "best": max(found.metrics["accuracy"] for found in grid),
        "iterations": sum(found.metrics["training_iteration"] for found in grid),
        "trials": len(grid),
        "trial_seconds": sum(found.metrics["time_total_s"] for found in grid),
        "errors": len(grid.errors),
        "ray_up_seconds": ray_up,
        **watch.until_first,
    }
    if args.algorithm == "grid" and args.trainable != "emulated":
        measured["launches"] = watch.launches(args.cpus)
    with open(args.out, "w") as file:
        json.dump(measured, file)
    ray.shutdown()


if __name__ == "__main__":
    main()
