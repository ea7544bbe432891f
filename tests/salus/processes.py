"""What the tests run in processes of their own, and how they talk to them. It imports little: it is spawned often."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from salus_share import turns
from salus_share.gate import Gate
from salus_share.seat_table import lock_of

#: How long a test waits for what must happen, seconds. A failure takes this long, a success some milliseconds.
PATIENCE_S = 60.0
_spawn = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def mps_server(folder: Path) -> Iterator[int]:
    """The pid of a process that is called as an MPS server is, and only sleeps."""
    program = folder / "nvidia-cuda-mps-server"
    shutil.copy(shutil.which("sleep") or "", program)
    with subprocess.Popen([program, "600"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@contextlib.contextmanager
def home() -> Iterator[Path]:
    """A short path for a device (a socket's has at most 107 letters)."""
    directory = Path(tempfile.mkdtemp(prefix="salus-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def as_another_user(monkeypatch) -> None:
    """From now on what this process has made is another user's to the code under test."""
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 4242)


@contextlib.contextmanager
def at_most(limit: int, allowed: int) -> Iterator[None]:
    """The kernel allows this process no more than that. ``limit``: as `resource.RLIMIT_FSIZE`, the bytes of a file."""
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (allowed, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


class Child:
    """A process that runs ``work(pipe, *args)``."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=work, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def told(self) -> Any:
        """What the process sends next."""
        if not self._pipe.poll(PATIENCE_S):
            raise AssertionError(f"process {self.process.pid} is silent")
        return self._pipe.recv()

    def silent(self, seconds: float = 0.3) -> bool:
        """Whether it sends nothing for a while."""
        return not self._pipe.poll(seconds)

    def tell(self, what: Any) -> None:
        self._pipe.send(what)

    def kill(self, how: int = signal.SIGKILL) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, how)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()


# Work


def hold(pipe: Connection, directory: Path, name: str) -> None:
    """Run iterations that last until a message comes. Sends "in" at the beginning of each and "out" after it."""
    gate = Gate(directory, name, "FAIR")
    pipe.send("ready")
    while pipe.recv() == "go":
        with gate.iteration():
            pipe.send("in")
            pipe.recv()
        pipe.send("out")


def die_with_the_lock(pipe: Connection, directory: Path) -> None:
    """Take the table's lock and die; a forked child, such as a data loader's worker, lives on."""
    with lock_of(directory):
        child = os.fork()
        if child == 0:
            time.sleep(PATIENCE_S)
            os._exit(0)
        pipe.send(child)
        os.kill(os.getpid(), signal.SIGKILL)


def exclude(pipe: Connection, directory: Path, name: str, lane: int, iterations: int, threads: int) -> None:
    """Run iterations that look whether another trial is in the lane. Sends how often one was."""
    inside = directory / f"inside-{lane}"
    gates = [Gate(directory, f"{name}-{i}", "FAIR", lane=lane) for i in range(threads)]
    met = []

    def work(gate: Gate, slow: bool) -> None:
        for _ in range(iterations):
            with gate.iteration():
                try:
                    fd = os.open(inside, os.O_CREAT | os.O_EXCL)
                except FileExistsError:
                    met.append(gate)
                    continue
                if slow:
                    time.sleep(0.0005)
                os.unlink(inside)
                os.close(fd)

    pipe.send("ready")
    pipe.recv()
    running = [threading.Thread(target=work, args=(gate, bool(i % 2))) for i, gate in enumerate(gates)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    pipe.send(len(met))


def iterate(
    pipe: Connection, directory: Path, name: str, policy: str, seconds: float, gap: float, remaining: float = 0.0
) -> None:
    """Run iterations of ``seconds`` with gaps of ``gap`` seconds until a message comes. Sends how many it ran."""
    gate = Gate(directory, name, policy, remaining=remaining)
    pipe.send("ready")
    pipe.recv()
    done = 0
    while not pipe.poll():
        with gate.iteration():
            time.sleep(seconds)
        done += 1
        time.sleep(gap)
    pipe.send(done)


def iterate_unhurried(pipe: Connection, *args: Any) -> None:
    """As `iterate`, but the lane is kept for a minute between two iterations, so that a slow machine is in time."""
    turns.LINGER_PART, turns.LINGER_S = 1e6, 60.0
    iterate(pipe, *args)
