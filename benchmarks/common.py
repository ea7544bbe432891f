"""What the benchmarks share: the machine in words, one JSON object, and sides that are run in turn.

A side is a process of its own with a Ray of its own; what is timed is the whole process, start-up included.
Nothing is measured here that a benchmark does not name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
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

#: One run of one side: its figures, numbers all.
Figures = dict[str, float]


def machine() -> str:
    """The machine that a figure was measured on."""
    memory = psutil.virtual_memory().total / 2**30
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith("model name")).split(":", 1)[1].strip()
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def say(text: str) -> None:
    """Progress, to stderr."""
    print(text, file=sys.stderr, flush=True)


def parser(description: str, repeats: bool = False) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes, or every one that is ``repeats``."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="one line of JSON instead of an indented object")
    made.add_argument("--quick", action="store_true", help="the same object in under a minute, for tests")
    if repeats:
        made.add_argument("--repeats", type=int, default=1, help="how often each side runs; medians are compared")
    return made


def cores(devices: str, kinds: Sequence[str] = ("cpu",)) -> int:
    """N of ``cpu:N``, or of another of ``kinds``. Raises argparse's error for anything else."""
    kind, _, count = devices.partition(":")
    if kind not in kinds or not count.isdigit() or int(count) < 1:
        wanted = " or ".join(f"{kind}:N" for kind in kinds)
        raise argparse.ArgumentTypeError(f"{devices!r} is not {wanted}, for example {kinds[-1]}:2")
    return int(count)


def result(benchmark: str, devices: str, kind: str, **figures: Any) -> dict[str, Any]:
    """The benchmark's JSON object; README.md has the keys."""
    return {"benchmark": benchmark, "machine": machine(), "devices": devices, "kind": kind, **figures}


def finish(figures: Mapping[str, Any], as_json: bool) -> None:
    """Print the object, last and on one line, or indented for a person."""
    print(json.dumps(figures, indent=None if as_json else 2), flush=True)


def ratios(sides: Mapping[str, Mapping[str, Any]], ours: str, key: str) -> dict[str, float]:
    """The other sides' ``key`` over ours."""
    return {name: side[key] / sides[ours][key] for name, side in sides.items() if name != ours}


def environment() -> dict[str, str]:
    """Of a process that finds this repository, and no Ray cluster that is another's."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [found.get("PYTHONPATH")])])
    found.pop("RAY_ADDRESS", None)
    return found


def run_process(command: Sequence[str], timeout: float = 900.0, show: bool = False) -> float:
    """Run a command to its end. Returns its wall time in seconds.

    ``show``: its output goes to stderr as it comes. Raises RuntimeError with the end of the output if it fails
    or takes longer than ``timeout`` seconds; nothing that it started is then left.
    """
    with tempfile.TemporaryFile("w+") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env=environment(),
            stdout=sys.stderr if show else output,
            stderr=sys.stderr if show else subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout)
        except BaseException as error:
            kill_tree(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = None
        seconds = time.perf_counter() - started
        if status != 0:
            output.seek(0)
            how = f"took more than {timeout:.0f} s" if status is None else f"ended with status {status}"
            raise RuntimeError(f"{' '.join(command)} {how}:\n{output.read()[-4000:]}")
    return seconds


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """The process and all that it started, Ray's own processes included (they have sessions of their own)."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
    process.kill()
    process.wait()


def repeat(sides: Mapping[str, Callable[[], Figures]], times: int) -> dict[str, dict[str, Any]]:
    """Run all sides in turn, ``times`` over. By side: the median of each figure, and ``all`` of the runs."""
    collected: dict[str, list[Figures]] = {name: [] for name in sides}
    for turn in range(times):
        for name, side in sides.items():
            figures = side()
            collected[name].append(figures)
            shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
            say(f"[{turn + 1}/{times}] {name}: {shown}")
    return {
        name: {**{key: statistics.median(run[key] for run in runs) for key in runs[0]}, "all": runs}
        for name, runs in collected.items()
    }
