"""Start Ray, run a job and stop Ray again and again in one process, as a notebook or a test suite does.

    python -m tests.faults.rounds --rounds 50

Each round also removes the experiment's folder as soon as ``fit`` has returned. Exit status 0: every round ended with
all of its files there, and every removed folder stayed removed. Ray itself ends the process with status 1 where a
thread drops a Ray object while ``ray.shutdown()`` runs.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune import RunConfig

import fluidtune
from fluidtune.report.pictures import REPORT_FILES

#: What a job has written when ``fit`` returns; the last four once for each trial.
OF_A_TRIAL = ("*/result.json", "*/progress.csv", "*/params.json", "*/events.out.*")
FILES = ("fluid_events.jsonl", *REPORT_FILES, *OF_A_TRIAL)


def loop(config: dict[str, Any]) -> None:
    for iteration in range(2):
        tune.report({"score": config["x"] * iteration})


def play(rounds: int, within: Path | None = None) -> None:
    """``within``: where the experiments' folders are made.

    Raises:
        RuntimeError: a trial failed, a file is missing when ``fit`` returns, or a removed folder is there again.
    """
    folders = []
    for number in range(1, rounds + 1):
        began = time.perf_counter()
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        folder = Path(tempfile.mkdtemp(dir=within))
        run = RunConfig(name="round", storage_path=str(folder), verbose=0)
        results = fluidtune.Tuner(loop, param_space={"x": tune.grid_search([1, 2])}, run_config=run).fit()
        missing = [name for name in FILES if not any((folder / "round").glob(name))]
        shutil.rmtree(folder)
        folders.append(folder)
        if results.errors or len(results) != 2 or missing:
            raise RuntimeError(f"round {number}: {results.errors}, not written: {missing}")
        del results
        ray.shutdown()
        print(f"round {number}: {time.perf_counter() - began:.1f} s", flush=True)
    gc.collect()
    back = [str(folder) for folder in folders if folder.exists()]
    if back:
        raise RuntimeError(f"removed, and there again: {back}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Start Ray, run a job and stop Ray, again and again.")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--within", type=Path, help="where the experiments' folders are made, an existing folder")
    chosen = parser.parse_args()
    play(chosen.rounds, chosen.within)
