"""Runs tests while random processes of the run are stopped and continued, as on a busy machine.

    python -m tests.stalls tests/tune -m ray
    python -m tests.stalls --every 2 --longest 3 tests/faults

All further arguments are pytest's. Each stop is printed: what was stopped, when, and for how long. A test that fails
only here waits for a time where it should wait for an event, or has found a race.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import subprocess
import sys
import time

import psutil

#: In the environment of every process of the run, and of no other.
MARK = "FLUIDTUNE_STALLED_RUN"


def processes_of(run: str) -> list[psutil.Process]:
    """The processes that inherited the mark ``run``, Ray's and the tests' own."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == run:
                found.append(process)
    return found


def stop_for_a_while(process: psutil.Process, seconds: float) -> None:
    with contextlib.suppress(psutil.Error):
        title = " ".join(process.cmdline())[:100]
        process.suspend()
        try:
            time.sleep(seconds)
        finally:
            process.resume()
        print(f"{time.strftime('%T')} pid {process.pid} stood still for {seconds:.1f} s: {title}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", type=float, default=6.0, help="mean seconds between two stops")
    parser.add_argument("--longest", type=float, default=2.0, help="seconds that a stop lasts at most")
    parser.add_argument("--seed", type=int, default=0)
    options, arguments = parser.parse_known_args()
    choose = random.Random(options.seed)
    run = secrets.token_hex(8)
    with subprocess.Popen([sys.executable, "-m", "pytest", *arguments], env={**os.environ, MARK: run}) as tests:
        while tests.poll() is None:
            time.sleep(choose.expovariate(1 / options.every))
            running = processes_of(run)
            if running:
                stop_for_a_while(choose.choice(running), choose.uniform(options.longest / 4, options.longest))
        return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
