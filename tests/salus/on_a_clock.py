"""Real gates and a real seat table under a clock that the test holds; `test_turns` runs them.

Each trial is a thread that runs the code of a real trial: it takes a seat and passes `Gate.iteration`. When it comes,
in which lane, and when it makes room is decided by the twin's `Admission`: FluidTune's engine moves no trial so.

Only one thread runs at a time, until it sleeps. Then the clock goes to the next moment at which a thread has slept
enough, or has a packet to read. So a run is exact, although sockets and shared memory are real.
"""

from __future__ import annotations

import json
import math
import select
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.shared_device import messages as m
from benchmarks.shared_device.admission import Admission
from benchmarks.shared_device.twin import MOVE_RATE, TwinJob
from salus_share import SalusError, gate, policy
from salus_share.gate import Gate
from salus_share.turns import INSIDE, charge

#: How long a thread may run before the test gives up on it, seconds of real time.
PATIENCE_S = 120.0
#: The largest packet, bytes.
PACKET = 1 << 10


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
        packet = self.inbox.recv(PACKET, socket.MSG_PEEK)
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


class Lanes:
    """Admits trials, and tells them of it, and tells them to make room."""

    def __init__(self, capacity: int, policy_name: str, directory: Path) -> None:
        self.admission = Admission(capacity, policy(policy_name))
        self.policy_name, self.directory = policy_name, directory
        #: The table stays while it has this seat.
        self.keeper = Gate(directory, "keeper", policy_name, lane=-2)
        self.links: dict[str, socket.socket] = {}
        self.gates: dict[str, TwinGate] = {}

    def tell(self, event: m.Event) -> None:
        seats = self.keeper._table.seats()
        self._decide(m.Served({one.name: one.standing for one in seats if one.name in self.admission.table.places}))
        if isinstance(event, m.JobLeft):
            self.gates[event.job].leave()
        self._decide(event)

    def _decide(self, event: m.Event) -> None:
        for told in self.admission.handle(event):
            match told:
                case m.Admit(job, lane, token):
                    self.links[job].send(json.dumps({"lane": lane, "token": token}).encode())
                case m.Pause(job):
                    self.gates[job].make_room()


class TwinGate(Gate):
    """A gate whose trial may be told to make room: it loses its seat, and finds that out when it comes next."""

    told, remaining = False, 0.0
    clock: Clock

    def _sleep(self, inbox: socket.socket | None, mates: object, timeout: float) -> bool:
        assert inbox is not None
        self.clock.sleep(timeout, inbox)
        while has_packet(inbox):
            inbox.recv(16)
        return False

    def make_room(self) -> None:
        with self._lock:
            seat = self._table.seat(self._index)
            self.told, self.remaining = seat.state == INSIDE, seat.remaining
            woken = None if self.told else self._turns.leave(self._index, gate.time.monotonic())
        for index in () if self.told else (self._index, woken):
            if index is not None:
                self._waker.wake(self._table, index)

    def __exit__(self, *error: object) -> None:
        if not self.told:
            super().__exit__(*error)
            return
        self.told = self._inside = False
        now = gate.time.monotonic()
        with self._lock:
            _, service, remaining, _ = self._table.counts(self._index)
            service, self.remaining = charge(service, remaining, now - self._began)
            self._table.record_iteration(self._index, service, self.remaining, now - self._began)
            granted = self._turns.leave(self._index, now)
        if granted is not None:
            self._waker.wake(self._table, granted)


def run(jobs: Sequence[TwinJob], capacity: int, policy: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a trace by real gates. It is over when every job is."""
    clock = Clock()
    monkeypatch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: clock.now))
    lanes = Lanes(capacity, policy, directory)
    for job in jobs:
        clock.start(lambda job=job: _trial(job, clock, lanes))  # type: ignore[misc]
    clock.run()
    lanes.keeper.leave()


def _trial(job: TwinJob, clock: Clock, lanes: Lanes) -> None:
    ours, lanes.links[job.name] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def admitted(remaining: float) -> TwinGate:
        lanes.tell(m.JobAdded(job.name, job.need, remaining))
        clock.sleep(math.inf, ours)
        told = json.loads(ours.recv(PACKET))
        made = TwinGate(lanes.directory, job.name, lanes.policy_name, lane=told["lane"], remaining=remaining)
        lanes.gates[job.name], made.clock = made, clock
        return made

    clock.sleep(job.arrival)
    mine = admitted(job.alone)
    moving = float(job.need.persistent) / MOVE_RATE
    left = job.iterations
    while left:
        try:
            with mine.iteration():
                clock.sleep(job.seconds)
        except SalusError:
            clock.sleep(moving)
            lanes.tell(m.JobLeft(job.name))
            mine = admitted(mine.remaining)
            clock.sleep(moving)
            continue
        left -= 1
        if left and job.gap:
            clock.sleep(job.gap)
    lanes.tell(m.JobLeft(job.name))
    ours.close()
    lanes.links[job.name].close()
