"""Seconds from ``sbatch`` to a search's first result, beside those to the first word of a job that does nothing else.

``python -m benchmarks.slurm_start --repeats 5 [--nodes N]`` where Slurm's commands are and the current folder is shared
with its nodes. The difference is what FluidTune and Ray add to Slurm's own; the issue that this came with allows 15 s.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import finish, parser, result, run_process, say

SEARCH = """\
import os, time
from ray import tune


class First(tune.Callback):
    def on_trial_result(self, iteration, trials, trial, result, **info):
        print("FIRST", time.time(), flush=True)


config = tune.RunConfig(storage_path=os.getcwd() + "/results", callbacks=[First()], verbose=0)
tune.Tuner(lambda config: {"x": 1}, run_config=config).fit()
"""


def seconds(command: list[str], folder: Path) -> float:
    """Seconds from the start of a command that waits for its job to the first word in the job's output."""
    begun = time.time()
    run_process(command, cwd=folder)
    words = (folder / "job.out").read_text().split()
    (folder / "job.out").unlink()
    return float(words[words.index("FIRST") + 1]) - begun


def main() -> None:
    options = parser("Seconds from sbatch to a search's first result.", True)
    options.add_argument("--nodes", type=int, default=1, help="nodes of the job")
    args = options.parse_args()
    sides: dict[str, list[float]] = {"slurm": [], "fluid": []}
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve()
        (folder / "search.py").write_text(SEARCH)
        own = ["--wait", f"--nodes={args.nodes}", "--output=job.out", "--time=10"]
        wrap = "--wrap=date '+FIRST %s.%N'"
        for _ in range(args.repeats):
            sides["slurm"].append(seconds(["sbatch", *own, wrap], folder))
            fluid = [sys.executable, "-m", "fluidtune", "slurm", "search.py", *own]
            sides["fluid"].append(seconds(fluid, folder))
            say(str(sides))
    medians = {side: statistics.median(each) for side, each in sides.items()}
    added = medians["fluid"] - medians["slurm"]
    figures = {"nodes": args.nodes, "sides": sides, "seconds": medians, "added_seconds": added}
    finish(result("slurm_start", f"{args.nodes} nodes", "real", **figures), args.json)


if __name__ == "__main__":
    main()
