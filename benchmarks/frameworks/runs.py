"""Runs one script on one side, and compares what the sides have found.

A run is a process of its own with a Ray cluster of its own. Its results, its temporary files and Ray's lie in a
directory that is removed when it has ended.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import environment, run_process
from benchmarks.frameworks.catalogue import path
from benchmarks.sides import OURS

#: Side -> what comes before the script on the command line, and what comes after it.
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    OURS: ([sys.executable, "-m", "fluidtune", "run"], []),
    "stock": ([sys.executable], []),
    "stock_reuse": ([sys.executable], ["--reuse"]),
}
#: Seconds that a script's first run may take. The longest took 83 s on two busy cores.
LIMIT_S = 240.0
#: Relative difference below which two metrics are equal. Sums may have another order, seeds are the same.
TOLERANCE = 1e-6

#: What a run has found: its script's JSON line, with ``seconds`` added.
Outcome = dict[str, Any]


def run(name: str, side: str, trials: int | None = None, limit: float = LIMIT_S) -> Outcome:
    """Run a script to its end on a side; ``trials``: how many, if not all.

    ``seconds`` is the time of the whole process.
    Raises RuntimeError with the end of the output if the script fails, NotEnded if it takes longer than ``limit`` s.
    """
    before, after = COMMANDS[side]
    # The name is short because the path of a Unix socket, such as Ray's, has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="fw-", ignore_cleanup_errors=True) as directory:
        storage = Path(directory) / "results"
        command = [*before, str(path(name)), "--storage", str(storage), *after]
        if trials is not None:
            command += ["--trials", str(trials)]
        environ = {**environment(), "TMPDIR": directory, "RAY_TMPDIR": directory, "RAY_USAGE_STATS_ENABLED": "0"}
        seconds, output = run_process(command, limit, cwd=directory, environ=environ)
    found = next(line for line in reversed(output.splitlines()) if line.startswith('{"fit_seconds"'))
    return {"seconds": seconds, **json.loads(found)}


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal: all names and texts the same, all numbers within TOLERANCE of each other."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=TOLERANCE) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def differences(ours: Outcome, stock: Outcome) -> list[str]:
    """What differs between the results of two sides, one line a trial; then what the trials have left behind."""
    found = [
        f"{trial}: {ours['results'].get(trial)} (stock: {stock['results'].get(trial)})"
        for trial in sorted({*ours["results"], *stock["results"]})
        if not same(ours["results"].get(trial), stock["results"].get(trial))
    ]
    if not same(ours["left"], stock["left"]):
        found.append(f"left behind: {ours['left']} (stock: {stock['left']})")
    return found


def medians(runs: Sequence[Outcome]) -> dict[str, float]:
    """The median of each figure that a benchmark compares, over the runs of one side."""
    names = ("seconds", "fit_seconds", "processes", "trials", "errors")
    return {name: median(each[name] for each in runs) for name in names}
