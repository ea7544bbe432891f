"""A HyperBand search over a function that notes each step that it does: which are done twice, in how many processes.

``python benchmarks/counted_search.py CORES TRIALS STEPS FOLDER [--checkpoints]``, or ``fluidtune run`` of it. It uses
nothing but stock Ray Tune. It prints one JSON object: ``steps`` that were done, how many of them ``twice``, and in how
many ``processes``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import HyperBandScheduler


def train(config: dict[str, Any]) -> None:
    """Without checkpoints it begins anew whenever it is called."""
    found, begin = tune.get_checkpoint(), 0
    if found is not None:
        with found.as_directory() as folder:
            begin = int(Path(folder, "step").read_text())
    for step in range(begin + 1, 1000):
        with Path(config["notes"]).open("a") as notes:
            notes.write(f"{config['x']} {step} {os.getpid()}\n")
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            saved = tune.Checkpoint.from_directory(folder) if config["saves"] else None
            tune.report({"value": config["x"] * step}, checkpoint=saved)


def main() -> None:
    cores, trials, steps = map(int, sys.argv[1:4])
    folder = Path(sys.argv[4])
    notes = folder / "notes"
    notes.touch()
    ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False)
    space = {"x": tune.grid_search(list(range(trials))), "notes": str(notes), "saves": "--checkpoints" in sys.argv}
    results = tune.Tuner(
        train,
        param_space=space,
        tune_config=tune.TuneConfig(metric="value", mode="max", scheduler=HyperBandScheduler(max_t=steps)),
        run_config=tune.RunConfig(storage_path=str(folder), name="job", verbose=0),
    ).fit()
    assert not results.errors, results.errors
    done = [line.split() for line in notes.read_text().splitlines()]
    twice = len(done) - len({(x, step) for x, step, _ in done})
    print(json.dumps({"steps": len(done), "twice": twice, "processes": len({pid for *_, pid in done})}))


if __name__ == "__main__":
    main()
