"""The three sides on which a tuning job is run: `fluid` (ours), `stock` and `stock_reuse`.

Each is a whole process that runs the same script (job.py) with the same arguments on the same number of cores: `fluid`
through ``fluidtune run``, `stock` with ``python``, and `stock_reuse` with ``python`` and Tune's ``reuse_actors``. On
emulated devices all three have a Ray cluster with the same number of emulated GPUs, and the same profile. On the stock
sides the script itself makes iterations last as long as the profile says.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.common import PROCESS_LIMIT_S, ROOT, Figures, cores, run_process

#: The name of our side.
OURS = "fluid"
JOB = str(ROOT / "benchmarks" / "job.py")


def under_fluidtune(devices: str, script: str, *args: str, settings: Sequence[str] = ()) -> list[str]:
    """The command that runs a script under FluidTune; ``settings``: further options of ``fluidtune run``."""
    return [sys.executable, "-m", "fluidtune", "run", "--devices", devices, *settings, script, *args]


def distance(run: Path) -> Figures:
    """Of a run of ours: the seconds of its bound, and its own seconds divided by these."""
    bound = json.loads((run / "summary.json").read_text())["bound"]
    return {"bound_seconds": bound["seconds"], "bound_ratio": bound["ratio"]}


def sides(
    devices: str,
    job: Sequence[str],
    profile: str | None = None,
    keep: str | None = None,
    settings: Sequence[str] = (),
) -> dict[str, Callable[..., Figures]]:
    """Name of a side -> a function that runs job.py with the arguments ``job`` there and returns its measurements.

    The function may be given the seconds that the run may take. It raises NotEnded if that takes longer.

    ``profile``: a file, for emulated devices. ``keep``: a directory that receives each side's last experiment.
    ``settings``: further options of ``fluidtune run`` on our side.
    """
    emulated = devices.startswith("emulated")
    count = cores(devices, ("cpu", "emulated"))
    settings = [*settings, *(["--profile", str(profile)] if emulated else [])]

    def side(name: str, command: Sequence[str], *more: str) -> Callable[..., Figures]:
        def run(limit: float = PROCESS_LIMIT_S) -> Figures:
            with tempfile.TemporaryDirectory(prefix="fluidtune-benchmark-") as directory:
                out = Path(directory) / "out.json"
                cpus = str(os.cpu_count() or 1) if emulated else str(count)
                place = ["--cpus", cpus, "--storage", directory, "--out", str(out)]
                if emulated:
                    place += ["--gpus", str(count), "--profile", str(profile)]
                seconds = run_process([*command, *job, *place, *more], limit).seconds
                found = json.loads(out.read_text())
                if name == OURS:
                    found |= distance(Path(directory) / "job")
                if keep is not None:
                    shutil.rmtree(Path(keep) / name, ignore_errors=True)
                    shutil.copytree(Path(directory) / "job", Path(keep) / name)
            if "launches" in found:
                found["launch_seconds"] = median(found.pop("launches"))
            return {"seconds": seconds, **found}

        return run

    ours = under_fluidtune(devices, JOB, settings=settings)
    pace = ["--pace"] if emulated else []
    return {
        OURS: side(OURS, ours),
        "stock": side("stock", [sys.executable, JOB], *pace),
        "stock_reuse": side("stock_reuse", [sys.executable, JOB], "--reuse", *pace),
    }
