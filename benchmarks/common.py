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
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parent.parent

#: Seconds that a command may take where nothing else is said: twice the longest side of all benchmarks.
PROCESS_LIMIT_S = 900.0
#: Seconds in which a killed process ends. It ends at once unless it is held in the kernel.
KILLED_S = 30.0
#: The figures of one run of one side: name -> number.
Figures = dict[str, float]


class NotEnded(RuntimeError):
    """A command was ended because it took longer than it may."""


class Ran(NamedTuple):
    """A command that has ended well: its wall time in seconds, and what it wrote to stdout and stderr."""

    seconds: float
    output: str


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


def parser(description: str, repeats: bool = False, limit: bool = False) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark.

    ``repeats``: also with --repeats. ``limit``: also with --limit, for `side_limit.SideLimit`.
    """
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="one line of JSON instead of an indented object")
    made.add_argument("--quick", action="store_true", help="the same object in under a minute, for tests")
    if repeats:
        made.add_argument("--repeats", type=int, default=1, help="how often each side runs; medians are compared")
    if limit:
        made.add_argument(
            "--limit", type=float, metavar="SECONDS", help="end a side after so long (20 times what the first took)"
        )
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


def run_process(
    command: Sequence[str],
    limit: float = PROCESS_LIMIT_S,
    *,
    cwd: str | Path = ROOT,
    environ: Mapping[str, str] | None = None,
    show: bool = False,
) -> Ran:
    """Run a command to its end.

    ``environ``: its environment instead of `environment`. ``show``: its output goes to stderr as it comes.
    Raises RuntimeError with the end of the output if the command fails, and NotEnded if it takes longer than ``limit``
    seconds; all processes that it started are killed then.
    """
    with tempfile.TemporaryFile("w+") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            list(command),
            cwd=cwd,
            env=environment() if environ is None else environ,
            stdout=sys.stderr if show else output,
            stderr=sys.stderr if show else subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
        except BaseException as error:
            kill_tree(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = None
        seconds = time.perf_counter() - started
        output.seek(0)
        said = output.read()
        if status is None:
            raise NotEnded(f"{' '.join(command)} took more than {limit:.0f} s:\n{said[-4000:]}")
        if status != 0:
            raise RuntimeError(f"{' '.join(command)} ended with status {status}:\n{said[-4000:]}")
    return Ran(seconds, said)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill the process and all its descendants, also Ray's processes, which have other sessions.

    They are stopped first, parents before their children, so that none starts another one that nobody sees. A process
    that a driver holds in the kernel does not end before the driver lets go: they are waited for KILLED_S only.
    """
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        while new := [each for each in (root, *root.children(recursive=True)) if each.pid not in found]:
            for each in new:
                found[each.pid] = each
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGSTOP)
    for each in found.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGKILL)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)
    psutil.wait_procs([each for each in found.values() if each.pid != process.pid], timeout=KILLED_S)
