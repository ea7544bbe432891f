"""Run the scripts of guides as trials, under stock Ray Tune and under FluidTune, and say where they differ.

    python -m tests.idioms.both_sides
    python -m tests.idioms.both_sides --only pool n_jobs

Each script runs twice, with two seeds, in one job a side; under FluidTune warm workers serve many of them one after the
other. Compared are the reports, the error, and the names of the files in the trial's folder. It prints a line for each
script: equal, or what differs; at the end why FluidTune replaced workers. Exit status 0: nothing differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune import RunConfig

import fluidtune
from fluidtune.report import EVENT_LOG_NAME, read_events
from tests.idioms import library_scripts, torch_scripts

SCRIPTS = {each.__name__: each for each in (*torch_scripts.SCRIPTS, *library_scripts.SCRIPTS)}
#: What Tune and FluidTune themselves put into a trial's folder.
OWN = ("result.json", "progress.csv", "params.json", "params.pkl", "error.txt", "error.pkl", "events.out.tfevents")


def script(config: dict[str, Any]) -> None:
    """The trainable: the script of that name."""
    SCRIPTS[config["script"]](config)


class Side:
    """What came of one side: by script and seed the reports, the error and the files."""

    def __init__(self, name: str, names: list[str], folder: Path, seeds: tuple[int, ...], **settings: Any) -> None:
        space = {"script": tune.grid_search(names), "seed": tune.grid_search(list(seeds))}
        run = RunConfig(name=name, storage_path=str(folder), verbose=0)
        if name == "stock":
            results = tune.Tuner(script, param_space=space, run_config=run).fit()
        else:
            executor = fluidtune.FluidExecutor(**settings)
            results = fluidtune.Tuner(script, param_space=space, run_config=run, executor=executor).fit()
        print(f"{name} has ended", flush=True)
        self.found: dict[tuple[str, int], dict[str, Any]] = {}
        for each in results:
            config = each.config
            self.found[config["script"], config["seed"]] = {
                "reports": _reports(Path(each.path)),
                "error": _last_line(each.error),
                "files": sorted(p.name for p in Path(each.path).rglob("*") if p.is_file() and _is_scripts(p.name)),
            }
        events = read_events(folder / name / EVENT_LOG_NAME) if name == "fluid" else []
        self.processes = len({each.metrics.get("pid") for each in results if each.metrics})
        #: Why a worker was replaced.
        self.replaced = [event["reason"] for event in events if event["event"] == "worker_replaced"]


def _is_scripts(name: str) -> bool:
    return not name.startswith(OWN)


def _last_line(error: Any) -> str | None:
    return None if error is None else str(error).strip().splitlines()[-1]


def _reports(folder: Path) -> list[dict[str, Any]]:
    """The user's values of each report."""
    path = folder / "result.json"
    lines = path.read_text().splitlines() if path.exists() else []
    kept = ("training_iteration", "loss", "scale", "ema", "lr", "zeros", "quantized", "calls", "drawn", "C", "seen")
    return [{key: value for key, value in json.loads(line).items() if key in kept} for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, metavar="SCRIPT")
    options = parser.parse_args()
    names = options.only or [*SCRIPTS]
    os.environ.setdefault("PYTHONPATH", os.getcwd())
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        ours = Side("fluid", names, Path(folder), (1, 2), reserve=False)
        stock = Side("stock", names, Path(folder), (1, 2))
    unlike = 0
    for name in names:
        differs = [
            f"seed {seed}, {what}: {ours.found[name, seed][what]} (stock: {stock.found[name, seed][what]})"
            for seed in (1, 2)
            for what in ("reports", "error", "files")
            if ours.found[name, seed][what] != stock.found[name, seed][what]
        ]
        unlike += bool(differs)
        error = stock.found[name, 1]["error"]
        print(f"{name}: {'; '.join(differs) or 'equal'}", f"[{error}]" if error else "")
    for reason in ours.replaced:
        print(f"a worker was replaced: {reason}")
    print(f"{len(names)} scripts, {unlike} unlike; processes: {ours.processes} (stock: {stock.processes})")
    ray.shutdown()
    sys.exit(1 if unlike else 0)


if __name__ == "__main__":
    main()
