"""The tuning jobs that are compared: a stock Ray Tune script, which a side runs with ``python`` or ``fluidtune run``.

It mentions FluidTune nowhere but in the elastic example's own import; it writes what it measured to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "0")

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, HyperBandScheduler


class Watch(tune.Callback):
    """When each trial was chosen to run, when its first result came, and where it was in between."""

    def __init__(self):
        self.chosen = {}
        self.launches = []
        self.spans = []
        self.running = {}

    def on_step_begin(self, iteration, trials, **info):
        now = time.time()
        for trial in trials:
            if trial.status == "RUNNING" and trial.trial_id not in self.running:
                self.running[trial.trial_id] = now
            elif trial.status != "RUNNING" and trial.trial_id in self.running:
                self.spans.append((trial.trial_id, self.running.pop(trial.trial_id), now))

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.running.setdefault(trial.trial_id, time.time())


def sleeper(config):
    """A trial of a given number of seconds that trains nothing."""
    for step in range(config["steps"]):
        time.sleep(config["seconds"] / config["steps"])
        tune.report({"accuracy": 1.0 - 1.0 / (step + 1 + config["index"] / 100)})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", choices=["grid", "hyperband", "asha"], default="hyperband")
    parser.add_argument("--trainable", choices=["elastic", "plain", "sleep"], default="elastic")
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--trials", type=int, default=18)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--reuse", action="store_true")
    parser.add_argument("--storage", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    started = time.time()
    ray.init(address="local", num_cpus=args.cpus, include_dashboard=False, log_to_driver=False)
    if args.trainable == "sleep":
        trainable = sleeper
        space = {"index": tune.grid_search(list(range(args.trials))), "steps": 2, "seconds": 1.0}
        samples = 1
    else:
        if args.trainable == "elastic":
            from examples.digits_elastic import train as trainable
        else:
            from examples.digits_hyperband import train as trainable
        space = {
            "lr": tune.loguniform(1e-2, 3e-1),
            "momentum": tune.uniform(0.5, 0.95),
            "width": tune.choice([16, 24, 32]),
            "batch_size": tune.choice([64, 128]),
            "epochs": args.epochs,
            "seed": 0,
        }
        samples = args.trials
    scheduler = {
        "grid": lambda: FIFOScheduler(),
        "hyperband": lambda: HyperBandScheduler(max_t=args.epochs, reduction_factor=3),
        "asha": lambda: ASHAScheduler(max_t=args.epochs, grace_period=1, reduction_factor=3),
    }[args.algorithm]()
    watch = Watch()
    tuner = tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=samples,
            scheduler=scheduler,
            search_alg=tune.search.BasicVariantGenerator(random_state=0),
            reuse_actors=args.reuse,
        ),
        run_config=tune.RunConfig(name="job", storage_path=args.storage, verbose=0, callbacks=[watch]),
    )
    fit_started = time.time()
    grid = tuner.fit()
    ended = time.time()
    results = {
        "best": max(r.metrics["accuracy"] for r in grid),
        "errors": len(grid.errors),
        "iterations": sum(r.metrics["training_iteration"] for r in grid),
        "trials": len(grid),
        "fit_seconds": ended - fit_started,
        "job_seconds": ended - started,
        "spans": watch.spans,
        "started": fit_started,
        "ended": ended,
    }
    with open(args.out, "w") as file:
        json.dump(results, file)
    ray.shutdown()


if __name__ == "__main__":
    main()
