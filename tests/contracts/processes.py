"""Real processes for tests: each runs functions that the test sends it, one at a time.

They come from a fork server that has imported torch, so that one starts in a fraction of a second. No thread and no
group of torch exists there yet.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

_context = multiprocessing.get_context("forkserver")
# torch._dynamo is what the first optimizer of a process would import, which takes seconds.
_context.set_forkserver_preload(["fluidtune.elastic.session", "torch._dynamo"])
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, or give something away")


class PeerProcess:
    """A process; ``call`` runs a module-level function in it and gives back what it returned or raised."""

    def __init__(self) -> None:
        self._end, other = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(other,))
        self.process.start()
        other.close()
        self._children: list[psutil.Process] = []

    def call(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Any:
        """``fn(*args)`` in the process. AssertionError with its traceback if it raised, TimeoutError if it is late."""
        self.send(fn, *args)
        return self.result(timeout)

    def send(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Let the process run the function; `result` fetches the answer."""
        self._end.send((fn, args, kwargs))

    def result(self, timeout: float = 60.0) -> Any:
        """The answer to the last `send`, awaited for up to ``timeout`` seconds."""
        if not self._end.poll(timeout):
            raise TimeoutError(f"worker {self.process.pid} gave no answer within {timeout} s")
        ok, value = self._end.recv()
        if not ok:
            raise AssertionError(f"in worker {self.process.pid}:\n{value}")
        return value

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        """Kill the process alone, with SIGKILL, as the kernel would."""
        assert self.process.pid is not None
        with suppress(psutil.NoSuchProcess):
            self._children = psutil.Process(self.process.pid).children(recursive=True)
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def close(self) -> None:
        """Kill the process, if that was not done before, and all processes that it started."""
        if self.alive:
            self.kill()
        for child in self._children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


@contextmanager
def peer_processes(n: int) -> Iterator[list[PeerProcess]]:
    """n processes. They and what they started are gone afterwards."""
    started = [PeerProcess() for _ in range(n)]
    try:
        yield started
    finally:
        for peer in started:
            peer.close()


def in_a_process(test: Callable[..., None]) -> Callable[..., None]:
    """A test that runs in a process of its own, which gets what the test is given."""

    @functools.wraps(test)
    def outside(**given: Any) -> None:
        with peer_processes(1) as (process,):
            process.call(_inside, test.__module__, test.__name__, given)

    return outside


def _inside(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**given)


def until(condition: Callable[[], Any], timeout: float = 60.0) -> Any:
    """Wait until ``condition()`` is true, and return it. AssertionError after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {condition}"
        time.sleep(0.005)
    return found


def python(*words: str, by: Sequence[str] = (sys.executable,), cwd: Path | None = None, **variables: str) -> str:
    """What a process of this Python prints, which finds this project and comes to its end well. ``by``: its start."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    done = subprocess.run([*by, *words], capture_output=True, text=True, env=environment, cwd=cwd, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def connected(path: str) -> socket.socket:
    """A connection to the Unix socket at the path."""
    made = socket.socket(socket.AF_UNIX)
    made.connect(path)
    return made


@contextmanager
def without_descriptors(pid: int, connect: Callable[[], socket.socket]) -> Iterator[socket.socket]:
    """A connection for which the process had no descriptor, until now. ``connect`` makes it.

    AssertionError if the process has asked for it again and again meanwhile, instead of sleeping.
    """
    process = psutil.Process(pid)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    with ExitStack() as connections:
        for _ in range(limit + 1):
            waiting = connections.enter_context(connect())
        used = sum(process.cpu_times()[:2])
        time.sleep(1)
        assert sum(process.cpu_times()[:2]) - used < 0.3, "of a second on a core"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        yield waiting


def _serve(end: Connection) -> None:
    import faulthandler

    import torch

    faulthandler.enable()
    # A child of a fork server starts its own processes there by default. Those would outlive it: they end when their
    # parent has died, and their parent would be the fork server, which lives until the last of them has ended.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    while True:
        try:
            fn, args, kwargs = end.recv()
        except EOFError:
            return
        try:
            answer = (True, fn(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        end.send(answer)
