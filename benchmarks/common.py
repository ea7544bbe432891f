"""What every benchmark needs: the machine in words, one JSON line, and a side of a comparison run by itself.

A side runs in a process of its own, with a Ray of its own, one after the other; what is timed is the whole
process, start-up included.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent


def machine() -> str:
    """The machine that a figure was measured on."""
    memory = psutil.virtual_memory().total / 2**30
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def say(text: str) -> None:
    """Progress, to stderr."""
    print(text, file=sys.stderr, flush=True)


def finish(benchmark: str, devices: str, kind: str, as_json: bool, **figures: Any) -> None:
    """Print the result: one JSON object on the last line, or the same for a person."""
    result = {"benchmark": benchmark, "machine": machine(), "devices": devices, "kind": kind, **figures}
    if as_json:
        print(json.dumps(result))
    else:
        print(json.dumps(result, indent=2))


def ratios(sides: Mapping[str, Mapping[str, Any]], ours: str, key: str) -> dict[str, float]:
    """The other sides' ``key`` over ours."""
    return {name: side[key] / sides[ours][key] for name, side in sides.items() if name != ours}


def run_process(command: Sequence[str], timeout: float = 900.0, env: Mapping[str, str] | None = None) -> float:
    """Run a command to its end. Returns its wall time in seconds; raises with its output if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", **(env or {})}
    # A side must not find the cluster of another.
    environment.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryFile("w+") as output:
        started = time.perf_counter()
        done = subprocess.run(
            list(command), cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=timeout
        )
        seconds = time.perf_counter() - started
        if done.returncode != 0:
            output.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed:\n{output.read()[-4000:]}")
    return seconds


def repeat(sides: Mapping[str, Callable[[], dict[str, float]]], times: int) -> dict[str, dict[str, Any]]:
    """Run all sides in turn, ``times`` over; each figure's median, and all of them."""
    collected: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for round_ in range(times):
        for name, side in sides.items():
            figures = side()
            collected[name].append(figures)
            shown = ", ".join(f"{k} {v:.3g}" for k, v in figures.items() if isinstance(v, float))
            say(f"[{round_ + 1}/{times}] {name}: {shown}")
    return {
        name: {
            **{key: statistics.median(run[key] for run in runs) for key in runs[0]},
            "all": runs,
        }
        for name, runs in collected.items()
    }
