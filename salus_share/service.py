"""The lane service of a device: a small process that carries out what the device's `Admission` decides.

Trials announce over a local socket what they need, wait, and are given a seat in the seat table, a lane and a token.
No trial asks the service anything between two iterations. All that it knows is in the seat table too: when it is
killed the trials go on, and the next service finds them in the same lanes. The first trial that needs a service starts
it (`start`). It ends by itself when no trial has been there for a while.

    python -m salus_share.service --home DIR --capacity BYTES --policy FAIR    # DIR must exist
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import selectors
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from salus_share import messages as m
from salus_share import requests
from salus_share.admission import Admission, Resident
from salus_share.errors import SalusError, ServiceLost
from salus_share.gate import Waker
from salus_share.lanes import Place
from salus_share.policies import POLICIES, policy
from salus_share.private_files import check_peer, open_own, own_directory
from salus_share.processes import own_environment
from salus_share.seat_table import FILE, FREE, LEFT, OFFERED, RESIDENT, WAITING, Seat, SeatTable, alive
from salus_share.turns import INSIDE, PAUSED, Turns

#: How often the service looks at the seat table by itself, and how long it stays without a trial; seconds.
TICK_S, IDLE_S = 0.25, 30.0
#: Seconds that it sleeps when there is no descriptor for another connection: its listener stays ready. Who asks waits.
_FULL_S = 0.1
#: The largest message, bytes; a message has a few hundred.
PACKET = 1 << 16
#: How long a trial waits for a service to come up, seconds.
START_S = 20.0


@dataclass
class _Visitor:
    """A connection, and the name of the trial at its other end, once it has said it."""

    link: socket.socket
    name: str | None = None


class LaneService:
    """Serves the trials of one device.

    ``directory``: see `seat_table.home`. ``capacity``: bytes. ``idle_s``: how long it stays without a trial, seconds.
    """

    def __init__(self, directory: Path, capacity: int, policy_name: str, idle_s: float = IDLE_S) -> None:
        self._directory, self._idle_s = directory, idle_s
        self._policy = policy(policy_name)
        self._admission = Admission(capacity, self._policy)
        self._table = SeatTable.create(directory, capacity, policy_name)
        self._turns = Turns(self._policy, self._table)
        self._visitors: dict[str, _Visitor] = {}
        #: By trial: the index of its seat, and a pidfd of its process.
        self._seats: dict[str, int] = {}
        self._pidfds: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._open = 0
        self._waker = Waker()
        self._recover()
        path = directory / "service"
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Serve until no trial has been here for a while."""
        last = looked = time.monotonic()
        while True:
            for key, _ in self._selector.select(TICK_S):
                key.data()
            now = time.monotonic()
            if now - looked >= TICK_S:
                looked = now
                self._look()
            if self._open or self._seats:
                last = now
            elif now - last > self._idle_s:
                for name in ("service", FILE):
                    (self._directory / name).unlink(missing_ok=True)
                return

    # What the seat table says

    def _recover(self) -> None:
        """Go on where a service that was killed left off."""
        found = []
        with self._table.lock():
            for seat in self._table.seats():
                if seat.state in RESIDENT and alive(seat):
                    place = Place(seat.lane, seat.persistent, seat.ephemeral)
                    leaving = seat.state == PAUSED or bool(seat.pause)
                    found.append(Resident(seat.name, place, seat.token, seat.standing, leaving))
                    self._seats[seat.name] = seat.index
                else:
                    # Its trial is dead, has left, or waited, or has not taken its room. One that lives asks again.
                    self._table.set_state(seat.index, FREE)
        self._carry_out(self._admission.restore(found, self._table.tokens))
        for name in self._seats:
            self._watch(name)

    def _look(self) -> None:
        """Tell admission what the table says: who is gone, and what the others were served."""
        with self._table.lock():
            seats = {seat.name: seat for seat in self._table.seats()}
        served = {}
        for name, seat in seats.items():
            job = self._admission.jobs.get(name)
            if self._seats.get(name) != seat.index or job is None:
                continue
            if seat.state == LEFT or not alive(seat):
                self._gone(name)
            elif seat.state in RESIDENT and seat.standing != job.standing:
                served[name] = seat.standing
        if served:
            self._tell(m.Served(served))

    def _gone(self, name: str) -> None:
        """A trial is dead, or has left: its memory is free."""
        index = self._seats.pop(name, None)
        if index is None:
            return
        with self._table.lock():
            lane = self._table.seat(index).lane
            self._table.set_state(index, FREE)
            granted = self._turns.grant(lane, time.monotonic())
        if granted is not None:
            self._waker.wake(self._table, granted)
        self._unwatch(name)
        self._tell(m.JobLeft(name))

    def _unwatch(self, name: str) -> None:
        fd = self._pidfds.pop(name, None)
        if fd is not None:
            self._selector.unregister(fd)
            os.close(fd)

    def _watch(self, name: str) -> None:
        with self._table.lock():
            pid = self._table.seat(self._seats[name]).pid
        # Where it has ended, or there is no descriptor for it, `_look` finds its death.
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(pid)
            self._selector.register(fd, selectors.EVENT_READ, lambda: self._gone(name))
            self._pidfds[name] = fd

    # What visitors say

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:
            time.sleep(_FULL_S)
            return
        try:
            check_peer(link)
        except SalusError:
            link.close()
            return
        visitor = _Visitor(link)
        self._open += 1
        self._selector.register(link, selectors.EVENT_READ, lambda: self._receive(visitor))

    def _receive(self, visitor: _Visitor) -> None:
        try:
            packet = visitor.link.recv(PACKET)
        except OSError:
            packet = b""
        if not packet:
            self._selector.unregister(visitor.link)
            visitor.link.close()
            self._open -= 1
            if visitor.name is not None and self._visitors.get(visitor.name) is visitor:
                del self._visitors[visitor.name]
                self._closed(visitor.name)
            return
        try:
            self._answer(visitor, json.loads(packet))
        except Exception as error:  # of this message alone: the trials that are here need the service
            if not isinstance(error, SalusError):
                traceback.print_exc()
            self._send(visitor, {"is": "error", "text": str(error)})

    def _closed(self, name: str) -> None:
        """A trial hung up. While its process lives and holds memory, it may come back: only its client may be gone."""
        if name not in self._seats:
            return
        with self._table.lock():
            seat = self._table.seat(self._seats[name])
            if seat.state == OFFERED:
                self._table.set_state(seat.index, LEFT)  # from now on it cannot be taken
        if seat.state in (LEFT, WAITING, OFFERED) or not alive(seat):
            self._gone(name)

    def _answer(self, visitor: _Visitor, message: Any) -> None:
        match requests.read(message):
            case requests.Announce() as asked:
                self._announce(visitor, asked)
            case requests.Rejoin(name, token):
                seat = self._seat(name)
                if seat is None or seat.token != token:
                    self._send(visitor, {"is": "stale"})
                    return
                visitor.name = name
                self._visitors[name] = visitor
                self._send(visitor, {"is": "welcome"})
            case requests.TellNeed(need):
                name = self._speaker(visitor)
                seat = self._seat(name)
                if seat is not None and seat.state == INSIDE:
                    raise SalusError(f"{name!r} is within an iteration; tell what it needs at the boundary")
                instructions = self._admission.handle(m.NeedFound(name, need))
                # Recorded before others are admitted to what it gives back: the table never says more than fits.
                if name in self._admission.table.places:
                    self._settle(name)
                self._carry_out(instructions)
                job = self._admission.jobs.get(name)
                if job is not None:
                    self._send(visitor, {"is": "pause"} if job.leaving else {"is": "room"})
            case requests.TellProgress(remaining, rung):
                name = self._speaker(visitor)
                self._tell(m.Progress(name, remaining, rung))
                with self._table.lock():
                    self._write_progress(self._table.seat(self._seats[name]), remaining, rung)
                self._send(visitor, {"is": "noted"})
            case requests.AskStatus():
                self._send(visitor, self._status())

    def _announce(self, visitor: _Visitor, asked: requests.Announce) -> None:
        name = asked.name
        # Who must make room depends on what the others have been served by now.
        self._look()
        there = self._seat(name)
        if there is not None:
            if there.state in RESIDENT and alive(there):
                raise SalusError(f"{name!r} is on this device already, in process {there.pid}; it must leave first")
            self._gone(name)
        with self._table.lock():
            seat = self._table.take_seat(name, asked.pid)
            self._write_progress(seat, asked.remaining, asked.rung)
        self._seats[name] = seat.index
        self._visitors[name], visitor.name = visitor, name
        self._tell(m.JobAdded(name, asked.need, asked.remaining, asked.rung))
        if name in self._seats:
            self._watch(name)

    def _write_progress(self, seat: Seat, remaining: float | None, rung: int) -> None:
        seat.remaining, seat.rung = math.nan if remaining is None else remaining, rung
        self._table.write(seat)

    def _speaker(self, visitor: _Visitor) -> str:
        if visitor.name is None:
            raise SalusError("announce or rejoin first")
        return visitor.name

    def _seat(self, name: str) -> Seat | None:
        if name not in self._seats:
            return None
        with self._table.lock():
            return self._table.seat(self._seats[name])

    def _status(self) -> dict[str, Any]:
        table = self._admission.table
        return {
            "is": "status",
            "pid": os.getpid(),
            "policy": self._policy.name,
            "capacity": int(table.capacity),
            "reserved": int(table.reserved),
            "lanes": {str(i): {"size": int(lane.size), "jobs": list(lane.jobs)} for i, lane in table.lanes.items()},
            "waiting": list(self._admission.waiting),
        }

    # What admission says

    def _tell(self, event: m.Event) -> None:
        self._carry_out(self._admission.handle(event))

    def _carry_out(self, instructions: list[m.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case m.Admit(name, lane, token):
                    self._settle(name, token)
                    self._push(name, {"is": "admitted", "seat": self._seats[name], "token": token, "lane": lane})
                case m.Move(name, _):
                    self._settle(name)
                case m.Pause(name):
                    index, woken = self._seats[name], []
                    with self._table.lock():
                        if self._table.seat(index).state == OFFERED:
                            self._table.set_leaving(index)
                        else:
                            woken = self._turns.pause(index, time.monotonic())
                    for index in woken:
                        self._waker.wake(self._table, index)
                case m.Refuse(name, reason):
                    index = self._seats.pop(name)
                    with self._table.lock():
                        self._table.set_state(index, FREE)
                    self._unwatch(name)
                    self._push(name, {"is": "refused", "reason": reason})

    def _settle(self, name: str, token: int | None = None) -> None:
        """Record a trial's lane and memory in the seat table, for the trial and for the next service.

        ``token``: of a new admission, None if it is none. It is one write, because the service may be killed after any.
        """
        place = self._admission.table.places[name]
        with self._table.lock():
            seat = self._table.seat(self._seats[name])
            if token is not None:
                seat.token, seat.state, seat.pause = token, OFFERED, 0
                seat.arrival = self._admission.jobs[name].standing.arrival
                self._table.tokens = token
            if token is not None or seat.lane != place.lane:
                seat.last_turn, seat.service = self._turns.level(seat.index, place.lane)
                seat.last_s = 0.0
            seat.lane, seat.persistent, seat.ephemeral = place.lane, int(place.persistent), int(place.ephemeral)
            self._table.write(seat)

    def _push(self, name: str, told: dict[str, Any]) -> None:
        visitor = self._visitors.get(name)
        if visitor is not None:
            self._send(visitor, told)

    def _send(self, visitor: _Visitor, told: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            visitor.link.send(json.dumps(told).encode())


def connect(directory: Path) -> socket.socket:
    """A connection to the device's service. Raises OSError if there is none, SalusError if it is another user's."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect(str(directory / "service"))
        check_peer(link)
    except (OSError, SalusError):
        link.close()
        raise
    return link


def start(directory: Path, capacity: int, policy_name: str) -> socket.socket:
    """A connection to the device's service, which is started if there is none.

    Raises SalusError if the service has another capacity or policy, ServiceLost if it ends, cannot be started, or is
    not up within `START_S`.
    """
    deadline = time.monotonic() + START_S
    process: subprocess.Popen[bytes] | None = None
    while True:
        with contextlib.suppress(OSError):
            link = connect(directory)
            try:
                SeatTable.create(directory, capacity, policy_name)
            except SalusError:
                link.close()
                raise
            return link
        if process is not None and process.poll() not in (None, 0):
            log = (directory / "service.log").read_text(errors="replace").strip().splitlines()
            raise ServiceLost(f"the lane service of {directory.name} did not start: {log[-1] if log else 'no output'}")
        if process is None or process.poll() is not None:
            try:
                process = _spawn(directory, capacity, policy_name)
            except OSError as error:
                raise ServiceLost(f"the lane service of {directory.name} cannot be started: {error}") from error
        if time.monotonic() > deadline:
            raise ServiceLost(f"no lane service at {directory} after {START_S:.0f} s; see service.log there")
        time.sleep(0.01)


def _spawn(directory: Path, capacity: int, policy_name: str) -> subprocess.Popen[bytes]:
    own_directory(directory)
    command = [sys.executable, "-m", "salus_share.service", "--home", str(directory)]
    command += ["--capacity", str(int(capacity)), "--policy", policy_name]
    with open(open_own(directory / "service.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=own_environment(), start_new_session=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="The lane service of one device.")
    parser.add_argument("--home", type=Path, required=True, help="the device's directory")
    parser.add_argument("--capacity", type=int, required=True, help="bytes")
    parser.add_argument("--policy", default="FAIR", help=f"{', '.join(POLICIES)} or module:Class")
    parser.add_argument("--idle", type=float, default=IDLE_S, help="seconds it stays without a trial")
    options = parser.parse_args()
    if not options.home.exists():
        # It was removed since `_spawn` made it: no trial needs this service any more, and it would leave files behind.
        return
    only = open_own(own_directory(options.home) / "service.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(only, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # Another one is up, or coming up.
        return
    try:
        LaneService(options.home, options.capacity, options.policy, options.idle).run()
    except SalusError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
