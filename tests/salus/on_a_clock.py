"""Real gates, a real lane service and a real seat table under a clock that the test holds; `test_turns` runs them.

Each trial is a thread that runs the code of a real trial: it announces itself, passes `Gate.iteration`, and makes room
after StaleToken. Only one thread runs at a time, until it sleeps. Then the clock goes to the next moment at which a
thread has slept enough, or has a packet to read. So a run is exact, although sockets and shared memory are real.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.shared_device.twin import MOVE_RATE, TwinJob
from salus_share import StaleToken, gate, service
from salus_share.gate import Gate
from salus_share.seat_table import FILE, SeatTable

#: How long a thread may run before the test gives up on it, seconds of real time.
PATIENCE_S = 120.0


class _Thread:
    """One thread that sleeps until ``wakes_at`` or until ``inbox`` has a packet."""

    def __init__(self, clock: Clock, work: Callable[[], None]) -> None:
        #: When it wakes, and how many sleeps had begun before this one: who went to sleep first wakes first.
        self.wakes_at = (0.0, 0)
        self.inbox: socket.socket | None = None
        self.go = threading.Semaphore(0)
        self.over = False
        self.error: BaseException | None = None
        self._clock = clock
        self._work = work
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self.go.acquire()
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self.over = True
        self._clock.stopped.release()

    @property
    def token(self) -> int | None:
        """None: it has no packet to read. Else the token of the admission in the packet, 0 if it has none."""
        if self.inbox is None or not has_packet(self.inbox):
            return None
        packet = self.inbox.recv(service.PACKET, socket.MSG_PEEK)
        return int(json.loads(packet)["token"]) if packet.startswith(b"{") else 0


def has_packet(inbox: socket.socket) -> bool:
    """Whether there is something to read."""
    return bool(select.select([inbox], [], [], 0)[0])


class Clock:
    """The clock, and the threads that live by it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = threading.Semaphore(0)
        self._threads: list[_Thread] = []
        self._current: _Thread | None = None
        self._sleeps = 0

    def start(self, work: Callable[[], None]) -> None:
        self._threads.append(_Thread(self, work))

    def sleep(self, seconds: float, inbox: socket.socket | None = None) -> None:
        """Called by a thread: sleep for ``seconds``, or until ``inbox`` has a packet."""
        me = self._current
        assert me is not None
        self._sleeps += 1
        me.wakes_at, me.inbox = (self.now + seconds, self._sleeps), inbox
        self.stopped.release()
        me.go.acquire()

    def run(self) -> None:
        """Run the threads to their ends. Raises what one of them raised."""
        while living := [thread for thread in self._threads if not thread.over]:
            # Trials that are admitted in one moment come to their gates in that order, as in the twin.
            ready = [(token, index) for index, thread in enumerate(living) if (token := thread.token) is not None]
            self._current = living[min(ready)[1]] if ready else min(living, key=lambda thread: thread.wakes_at)
            if not ready:
                assert self._current.wakes_at[0] < math.inf, "every thread waits for another"
                self.now = max(self.now, self._current.wakes_at[0])
            self._current.go.release()
            assert self.stopped.acquire(timeout=PATIENCE_S), "a thread waits for something that is not the clock"
            if self._current.error is not None:
                raise self._current.error


def run(jobs: Sequence[TwinJob], capacity: int, policy: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a trace by real gates. It is over when every job is."""
    clock = Clock()
    fake = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(gate, "time", fake)
    monkeypatch.setattr(service, "time", fake)

    def sleep(_: Gate, inbox: socket.socket, mates: object, timeout: float) -> bool:
        clock.sleep(timeout, inbox)
        while has_packet(inbox):
            inbox.recv(16)
        return False

    monkeypatch.setattr(Gate, "_sleep", sleep)
    made = service.LaneService(directory, capacity, policy)
    try:
        for job in jobs:
            clock.start(lambda job=job: _trial(job, clock, made, directory))  # type: ignore[misc]
        clock.run()
    finally:
        for pidfd in made._pidfds.values():
            os.close(pidfd)
        made._selector.close()
        made._listener.close()
        made._waker.close()
        (directory / FILE).unlink()


def _trial(job: TwinJob, clock: Clock, lanes: service.LaneService, directory: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    visitor = service._Visitor(theirs)

    def admitted(asked: dict[str, Any]) -> Gate:
        table = SeatTable(directory)
        while True:
            # As a tick of the service just before.
            lanes._look()
            lanes._answer(visitor, asked)
            clock.sleep(math.inf, ours)
            told = json.loads(ours.recv(service.PACKET))
            with table.lock():
                if table.claim(told["seat"], told["token"]):
                    return Gate(table, told["seat"], told["token"])

    clock.sleep(job.arrival)
    need = {"persistent": job.need.persistent, "ephemeral": job.need.ephemeral}
    announced = {"do": "announce", "name": job.name, "pid": os.getpid(), "remaining": job.alone, "rung": 0}
    mine = admitted(announced | need)
    moving = float(job.need.persistent) / MOVE_RATE
    left = job.iterations
    while left:
        try:
            with mine.iteration():
                clock.sleep(job.seconds)
        except StaleToken:
            table = SeatTable(directory)
            with table.lock():
                remaining = table.seat(mine._index).remaining
            clock.sleep(moving)
            mine.withdraw()
            mine = admitted(announced | need | {"remaining": remaining})
            clock.sleep(moving)
            continue
        left -= 1
        if left and job.gap:
            clock.sleep(job.gap)
    lanes._look()
    mine.withdraw()
    lanes._look()
    ours.close()
    theirs.close()
