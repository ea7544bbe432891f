"""The three ways in which a tuning job is run: `fluid` (ours), `stock` and `stock_reuse`.

Each is a whole process that runs the same script (job.py) with the same arguments on as many cores: `stock` as
it stands, `stock_reuse` with Tune's ``reuse_actors`` on, `fluid` through ``fluidtune run``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.common import ROOT, Figures, cores, run_process

OURS = "fluid"
JOB = str(ROOT / "benchmarks" / "job.py")


def under_fluidtune(devices: str, script: str, *args: str, backend: str = "torch") -> list[str]:
    """The command that runs a script under FluidTune."""
    settings = ["--devices", devices, "--backend", backend]
    return [sys.executable, "-m", "fluidtune.cli", "run", *settings, script, *args]


def sides(devices: str, job: Sequence[str]) -> dict[str, Callable[[], Figures]]:
    """By name, what runs job.py with the arguments ``job`` on that side and returns what it measured."""

    def side(command: Sequence[str], *more: str) -> Callable[[], Figures]:
        def run() -> Figures:
            with tempfile.TemporaryDirectory(prefix="fluidtune-benchmark-") as directory:
                out = Path(directory) / "out.json"
                place = ("--cpus", str(cores(devices)), "--storage", directory, "--out", str(out))
                seconds = run_process([*command, *job, *place, *more])
                found = json.loads(out.read_text())
            if "launches" in found:
                found["launch_seconds"] = median(found.pop("launches"))
            return {"seconds": seconds, **found}

        return run

    return {
        OURS: side(under_fluidtune(devices, JOB)),
        "stock": side([sys.executable, JOB]),
        "stock_reuse": side([sys.executable, JOB], "--reuse"),
    }
