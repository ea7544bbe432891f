"""Real worker processes for the tests: each runs functions that the test sends it, one at a time.

They come from a fork server that has imported torch, so that one starts in a fraction of a second; nothing
that torch keeps (threads, groups) exists there yet.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.elastic.trials"])


class Worker:
    """A process; ``call`` runs a module-level function in it and gives back what it returned or raised."""

    def __init__(self) -> None:
        self._end, other = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(other,))
        self.process.start()
        other.close()

    def call(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Any:
        self.send(fn, *args)
        return self.result(timeout)

    def send(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._end.send((fn, args, kwargs))

    def result(self, timeout: float = 60.0) -> Any:
        if not self._end.poll(timeout):
            raise TimeoutError(f"worker {self.process.pid} gave no answer within {timeout} s")
        ok, value = self._end.recv()
        if not ok:
            raise AssertionError(f"in worker {self.process.pid}:\n{value}")
        return value

    def kill(self) -> None:
        """SIGKILL, as the kernel would."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@contextmanager
def workers(n: int) -> Iterator[list[Worker]]:
    """n processes, gone afterwards."""
    started = [Worker() for _ in range(n)]
    try:
        yield started
    finally:
        for worker in started:
            if worker.process.is_alive():
                worker.kill()


def until(condition: Callable[[], Any], timeout: float = 30.0) -> None:
    """Wait for it; AssertionError after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {condition}"
        time.sleep(0.005)


def _serve(end: Connection) -> None:
    import faulthandler

    import torch

    faulthandler.enable()

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
