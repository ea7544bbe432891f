"""Two tuning jobs that share the cores of one Ray cluster through the arbiter.

    ray start --head --num-cpus 4
    python examples/two_tenants.py --name first &
    python examples/two_tenants.py --name second &
    fluidtune arbiter status
    wait; fluidtune arbiter stop; ray stop

The first job holds all four cores until the second one comes; then each holds about half of them. When a lease is not
renewed the trial on it moves at its next checkpoint, and no iteration is lost. For a short demonstration start the
arbiter with short leases before the jobs: ``fluidtune arbiter start --lease 20 --notice 5``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune

import fluidtune


class Walk(tune.Trainable):
    """A class trainable with checkpoints: it can be moved after any iteration."""

    def setup(self, config: dict[str, Any]) -> None:
        self.value = 0.0

    def step(self) -> dict[str, Any]:
        time.sleep(self.config["seconds"])
        self.value = 0.9 * self.value + self.config["lr"]
        return {"value": self.value}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "value.json").write_text(json.dumps(self.value))

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        self.value = json.loads(Path(checkpoint_dir, "value.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description="One of several tuning jobs that share a Ray cluster.")
    parser.add_argument("--name", required=True, help="name of the job; each job needs its own")
    parser.add_argument("--address", default="auto", help="address of the Ray cluster")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of an iteration")
    parser.add_argument("--storage", help="folder in which Tune stores the results")
    args = parser.parse_args()
    ray.init(address=args.address, log_to_driver=False)
    started = time.monotonic()
    results = fluidtune.Tuner(
        Walk,
        param_space={"lr": tune.grid_search([i + 1.0 for i in range(args.trials)]), "seconds": args.seconds},
        tune_config=tune.TuneConfig(metric="value", mode="max"),
        run_config=tune.RunConfig(
            name=args.name, storage_path=args.storage, verbose=0, stop={"training_iteration": args.iterations}
        ),
        executor=fluidtune.FluidExecutor(arbiter="auto"),
    ).fit()
    best = results.get_best_result()
    print(f"{args.name}: {len(results)} trials in {time.monotonic() - started:.0f} s, best {best.metrics['value']:.2f}")


if __name__ == "__main__":
    main()
