"""A trial with followers, for tests: a `DataParallelLeader` in this process, and followers that are forked."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from ray import cloudpickle

from fluidtune.elastic.divided.follower import Follower
from fluidtune.elastic.divided.leader import DataParallelLeader
from fluidtune.group_facts import GroupFacts

SECRET = b"s" * 32


class Grown:
    """A leader in this process whose width tests set. ``pays``, ``patient``: see `DataParallelLeader`."""

    def __init__(self, pays: bool = False, host: str | None = None, patient: bool = True) -> None:
        self.division = DataParallelLeader("trial", SECRET, host, pickling=cloudpickle, pays=pays, patient=patient)
        self.pids: list[int] = []
        self._host = host
        self.checked: list[tuple[str, str, str]] = []

    def width(self, width: int) -> None:
        """Have this many workers from the next call on."""
        while len(self.pids) + 1 > width:
            self.kill(self.pids[-1])
        while len(self.pids) + 1 < width:
            self.add()
        self.division.begin_iteration()
        self.division._looked = 0.0
        self.division._begin_look()

    @property
    def address(self) -> Any:
        """Where followers find the leader; with a host, as from another machine."""
        address = self.division.address
        return address if self._host is None else type(address)(address.name, "elsewhere", address.port)

    def add(self, wrap: Callable[[Follower], Any] = Follower.run) -> int:
        """Attach a follower. ``wrap``: what its process does with it."""
        followers = self.division.followers
        before, address = len(followers.present) + len(followers.arrived), self.address
        pid = os.fork()
        if pid == 0:
            try:
                follow(address, wrap)
            finally:
                os._exit(0)
        self.pids.append(pid)
        deadline = time.monotonic() + 20
        while len(followers.present) + len(followers.arrived) == before and time.monotonic() < deadline:
            time.sleep(0.001)
        return pid

    def kill(self, pid: int) -> None:
        self.pids.remove(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def close(self) -> None:
        self.division.close()
        for pid in list(self.pids):
            self.kill(pid)

    def facts(self) -> Any:
        facts = self.division.facts(GroupFacts())
        self.checked += facts.checked
        return facts


def follow(address: Any, wrap: Callable[[Follower], Any] = Follower.run) -> None:
    """What a follower's process does."""
    gc.freeze()  # what an earlier test has left, as a group of processes, ends in the process that made it only
    torch.set_num_threads(1)
    follower = Follower("trial", f"follower-{os.getpid()}", SECRET, pickling=cloudpickle)
    follower.attach(address)
    wrap(follower)


@contextmanager
def grown(width: int = 2, **more: Any) -> Iterator[Grown]:
    """A leader with followers, ended afterwards."""
    made = Grown(**more)
    try:
        made.width(width)
        yield made
    finally:
        made.close()
