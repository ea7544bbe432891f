"""The search of `benchmarks.driver_growth`: very many trials that report once, and what the driver has grown by.

A stock Ray Tune script in the manner of ray#64231: ``tune.run``, one core a trial, and a callback that looks at the
resident memory of its process, the driver, whenever 100 more trials have ended. It writes one line of JSON at the
start, and then after every 100 trials: ``trials``, ``seconds`` since the start, and ``resident`` bytes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import tune

#: Trials between two lines, as in the issue.
EVERY = 100


class Watch(tune.Callback):
    """Writes the lines into ``out``."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._ended = 0
        self._began = 0.0

    def setup(self, **info: Any) -> None:
        self._began = time.perf_counter()
        self._write()

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._ended += 1
        if self._ended % EVERY == 0:
            self._write()

    def _write(self) -> None:
        line = {
            "trials": self._ended,
            "seconds": time.perf_counter() - self._began,
            "resident": psutil.Process().memory_info().rss,
        }
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(config: dict[str, Any]) -> None:
    tune.report({"loss": config["x"] ** 2})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--reuse", action="store_true", help="set Tune's reuse_actors")
    parser.add_argument("--storage", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False)
    tune.run(
        train,
        config={"x": tune.uniform(-1.0, 1.0)},
        num_samples=args.trials,
        resources_per_trial={"cpu": 1},
        callbacks=[Watch(args.out)],
        storage_path=args.storage,
        name="job",
        verbose=0,
        # FluidTune decides by itself where the script says nothing.
        **({"reuse_actors": True} if args.reuse else {}),
    )
