"""The searches of `benchmarks.driver_growth`, and what the driver has grown by.

A stock Ray Tune script in the manner of ray#64231: ``tune.run``, one core a trial, and a callback that looks at the
resident memory of its process, the driver. ``--trials``: very many trials that report once. ``--results``: two trials
that report very often, each third time with a checkpoint, of which two are kept. The callback writes one line of JSON
at the start, and then after every 100 trials or results: ``done``, ``seconds`` since the start, ``resident`` bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import tune

#: Trials, or results, between two lines, as in the issue.
EVERY = 100


class Watch(tune.Callback):
    """Writes the lines into ``out``. ``results``: it counts these, and not trials."""

    def __init__(self, out: Path, results: bool) -> None:
        self._out, self._results = out, results
        self._done = 0
        self._began = 0.0

    def setup(self, **info: Any) -> None:
        self._began = time.perf_counter()
        self._write()

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._count(not self._results)

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        self._count(self._results)

    def _count(self, counts: bool) -> None:
        self._done += counts
        if counts and self._done % EVERY == 0:
            self._write()

    def _write(self) -> None:
        line = {
            "done": self._done,
            "seconds": time.perf_counter() - self._began,
            "resident": psutil.Process().memory_info().rss,
        }
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(config: dict[str, Any]) -> None:
    for iteration in range(1, config["results"] + 1):
        if config["results"] > 1 and iteration % 3 == 0:
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "iteration").write_text(str(iteration))
                tune.report({"loss": config["x"] ** 2}, checkpoint=tune.Checkpoint.from_directory(directory))
        else:
            tune.report({"loss": config["x"] ** 2})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--trials", type=int)
    size.add_argument("--results", type=int)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False)
    tune.run(
        train,
        config={"x": tune.uniform(-1.0, 1.0), "results": (args.results or 2) // 2},
        num_samples=args.trials or 2,
        resources_per_trial={"cpu": 1},
        callbacks=[Watch(args.out, bool(args.results))],
        checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
        storage_path=args.storage,
        name="job",
        verbose=0,
        reuse_actors=True,
    )
