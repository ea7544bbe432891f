"""Kills the parts of a fork server at random moments while processes are started through it.

``python -m tests.faults.forks --forks 1000 [--seed N]``. A holder keeps a server and starts another one when it has
died. Programs are started through launchers, some at a time; each appends its number to one file. Launchers, forked
processes, servers and holders are killed at random. Each program whose launcher and process were left alone must have
run exactly once, forked or plain, no other one more than once, and nothing may be left in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

#: Holds a server, and another one after that has died. It writes where the server is into a file.
HOLDER = """
import os, sys, time
from fluidtune.cluster.forks.fork_server import ForkServer
while True:
    server = ForkServer(["json"], dict(os.environ))
    state = server.finish([], {})
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(f"{state.pid} {state.command}")
    os.replace(sys.argv[1] + ".new", sys.argv[1])
    server.wait()
    server.stop()
"""
PROGRAM = """
import os, sys, time
forked = "fluidtune.cluster.forks.child" in sys.modules
with open(sys.argv[1], "a") as file:
    file.write(f"{sys.argv[2]} {os.getpid()} {forked}\\n")
time.sleep(float(sys.argv[3]))
"""
#: Programs at a time.
AT_A_TIME = 8


def ours(mark: str) -> Iterator[psutil.Process]:
    """The processes that this run has started: they have its mark in their environment."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("FORKS_RUN") == mark:
                yield process
        except psutil.Error:
            continue


def run(forks: int, seed: int, folder: Path) -> dict[str, Any]:
    """Start ``forks`` programs. Returns what came of them."""
    draw = random.Random(seed)
    mark = f"{os.getpid()}-{seed}"
    environment = {**os.environ, "FORKS_RUN": mark, "TMPDIR": str(folder), "PYTHONPATH": os.getcwd()}
    environment["PYTHONHASHSEED"] = "0"  # else the holder draws one
    where, lines, program = folder / "server", folder / "lines", folder / "program.py"
    program.write_text(PROGRAM)
    lines.touch()
    kills: Counter[str] = Counter()
    touched: set[int] = set()
    running: dict[int, subprocess.Popen[bytes]] = {}

    def hold() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", HOLDER, str(where)], env=environment)

    holder = hold()
    while not where.exists():
        time.sleep(0.05)
    started = 0
    while started < forks or running:
        while started < forks and len(running) < AT_A_TIME:
            command = where.read_text().split()[1:]
            words = [*command, str(program), str(lines), str(started), f"{draw.uniform(0, 0.1):.3f}"]
            running[started] = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
            started += 1
        part = draw.choices(["", "launcher", "process", "server", "holder"], [400, 6, 6, 2, 1])[0]
        if started > forks // 2 and not kills["server"]:  # few programs are started before chance comes to it
            part = "server"
        time.sleep(draw.uniform(0, 0.02))
        if part == "holder":
            holder.kill()
            holder.wait()
            holder = hold()
        elif part == "server":
            kill(int(where.read_text().split()[0]), mark)
        elif part and running:
            number = draw.choice(sorted(running))
            touched.add(number)
            kill(running[number].pid if part == "launcher" else process_of(lines, number), mark)
        kills[part] += 1
        for number in [each for each, launcher in running.items() if launcher.poll() is not None]:
            del running[number]
    holder.kill()
    holder.wait()
    until, quiet = time.monotonic() + 30, 0
    while quiet < 10 and time.monotonic() < until:  # a process that starts another one is easily missed
        quiet = 0 if any(True for _ in ours(mark)) else quiet + 1
        time.sleep(0.1)
    times = Counter(int(line.split()[0]) for line in lines.read_text().splitlines())
    return {
        "forks": forks,
        "seed": seed,
        "kills": dict(kills),
        "forked": sum(line.endswith("True") for line in lines.read_text().splitlines()),
        "lost": [number for number in range(forks) if number not in touched and times[number] != 1],
        "twice": [number for number, count in times.items() if count > 1],
        "left": [process.cmdline() for process in ours(mark)],
        "files": sorted({each.name for each in folder.iterdir()} - {"server", "lines", "program.py"}),
    }


def process_of(lines: Path, number: int) -> int | None:
    """The process of a program; None: it does not run yet."""
    found = [line.split() for line in lines.read_text().splitlines()]
    return next((int(words[1]) for words in found if len(words) == 3 and words[0] == str(number)), None)


def kill(pid: int | None, mark: str) -> None:
    """Kill a process of this run."""
    try:
        if pid is not None and psutil.Process(pid).environ().get("FORKS_RUN") == mark:
            psutil.Process(pid).kill()
    except psutil.Error:
        pass


def failed(found: dict[str, Any]) -> bool:
    return any(found[name] for name in ("lost", "twice", "left", "files"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--forks", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ft-") as folder:
        found = run(options.forks, options.seed, Path(folder))
    print(json.dumps(found))
    sys.exit(failed(found))


if __name__ == "__main__":
    main()
