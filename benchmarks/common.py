"""Shared by the benchmarks: the machine in words, the JSON object, and running several sides in turn.

A side is a separate process with its own Ray cluster. The time of a side is that of the whole process, start-up
included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
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

#: Seconds in which a killed process ends. Judgement: it ends at once unless it is held in the kernel.
KILLED_S = 30.0
#: The figures of one run of one side: name -> number.
Figures = dict[str, float]


def machine() -> str:
    """This machine in words: processor, cores, memory, Python."""
    memory = psutil.virtual_memory().total / 2**30
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith("model name")).split(":", 1)[1].strip()
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def parser(description: str, repeats: bool = False) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark; ``repeats``: also with --repeats."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="one line of JSON instead of an indented object")
    made.add_argument("--quick", action="store_true", help="the same object in under a minute, for tests")
    if repeats:
        made.add_argument("--repeats", type=int, default=1, help="how often each side runs; medians are compared")
    return made


def cores(devices: str, kinds: Sequence[str] = ("cpu",)) -> int:
    """N of ``cpu:N``, or of another of ``kinds``. Raises argparse.ArgumentTypeError for anything else."""
    kind, _, count = devices.partition(":")
    if kind not in kinds or not count.isdigit() or int(count) < 1:
        wanted = " or ".join(f"{kind}:N" for kind in kinds)
        raise argparse.ArgumentTypeError(f"{devices!r} is not {wanted}, for example {kinds[-1]}:2")
    return int(count)


def cpu_or_emulated(devices: str) -> str:
    """``devices`` unchanged, for argparse's ``type``. Raises argparse.ArgumentTypeError unless cpu:N or emulated:N."""
    cores(devices, ("cpu", "emulated"))
    return devices


def result(benchmark: str, devices: str, kind: str, **figures: Any) -> dict[str, Any]:
    """The benchmark's JSON object; benchmarks/README.md describes the keys."""
    return {"benchmark": benchmark, "machine": machine(), "devices": devices, "kind": kind, **figures}


def finish(figures: Mapping[str, Any], as_json: bool) -> None:
    """Print the object to stdout: on one line (``as_json``), or indented for people."""
    print(json.dumps(figures, indent=None if as_json else 2), flush=True)


def ratios(sides: Mapping[str, Mapping[str, Any]], ours: str, key: str) -> dict[str, float]:
    """Name of each other side -> its ``key`` divided by that of the side ``ours``."""
    return {name: side[key] / sides[ours][key] for name, side in sides.items() if name != ours}


def environment() -> dict[str, str]:
    """The environment of a side: it imports this repository and connects to no Ray cluster that runs already."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [found.get("PYTHONPATH")])])
    found.pop("RAY_ADDRESS", None)
    return found


def run_process(command: Sequence[str], timeout: float = 900.0, show: bool = False) -> float:
    """Run a command to its end. Returns its wall time in seconds.

    ``show``: its output goes to stderr as it comes. Raises RuntimeError with the end of the output if the command
    fails or takes longer than ``timeout`` seconds; all processes that it started are killed then.
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


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill the process and all its descendants, also Ray's processes, which have other sessions.

    A process that a driver holds in the kernel does not end before the driver lets go: it is waited for KILLED_S only.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


def repeat(sides: Mapping[str, Callable[[], Figures]], times: int) -> dict[str, dict[str, Any]]:
    """Run all sides in turn, ``times`` times. Side -> the median of each figure, and all runs under ``all``."""
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
