"""The gate: every iteration of a trial passes it, in microseconds when no other trial wants the lane.

    gate = Gate(home("gpu-0"), "trial-7", "FAIR", lane=0)
    for batch in data:
        with gate.iteration():
            step(model, batch)
    gate.leave()

The processes of the trials decide by themselves who passes, with `Turns` over the device's seat table, so that no other
process stands between two iterations. This module adds what `turns` leaves out: the clock, the lock, and how a
process waits. One that gives the lane to another wakes it by a datagram. In which lane a trial is, its caller says.

A process that waits also watches the processes of its lane, by their pidfds: when the one inside is killed, those that
wait wake at once, and one of them takes the lane. A process that has no room for these files looks at the table every
`LOOK_S` instead. Linux only.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path

from salus_share.errors import SalusError
from salus_share.policies import policy
from salus_share.private_files import own_directory
from salus_share.seat_table import Seat, SeatTable, bury, lock_of
from salus_share.turns import AWAY, IDLE, INSIDE, Turns

#: A trial that waits looks at the table at least this often, in seconds: for what no wake-up tells, such as two deaths
#: at once, or that it has no file to be woken by.
LOOK_S = 0.25


class Gate(AbstractContextManager[None]):
    """The gate of one trial, which has a seat at its device from now until `leave`, or until its process is dead.

    Not for several threads at once; a process with several trials has one gate for each. ``directory``: the device's,
    see `home`; ``name``: the trial's, for people. ``policy_name``: as in `policy`, the same for all trials of the
    device. ``lane``, ``remaining``, ``rung``: see `settle`.

    Raises:
        SalusError: the device has no seat or another policy, or its files are another user's or another container's.
        OSError: there is no room for its files.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        policy_name: str,
        *,
        lane: int = 0,
        remaining: float | None = None,
        rung: int = 0,
    ) -> None:
        chosen = policy(policy_name)
        #: The table's lock, and `Turns.arrive` and `Turns.end_iteration`: looked up once, because every pass uses them.
        self._lock = lock_of(own_directory(directory))
        with self._lock:
            table = self._table = SeatTable.create(directory, policy_name)
            turns = self._turns = Turns(chosen, table)
            seat = table.free_seat(name)
            self._place(seat, lane, remaining, rung)
        self._arrive, self._end_iteration = turns.arrive, turns.end_iteration
        self._index, self._arrival = seat.index, seat.arrival
        self._inside = False
        self._began = 0.0
        self._inbox: socket.socket | None = None
        self._waker = Waker()
        #: (pid, start) -> pidfd, of processes that were waited for lately.
        self._watched: dict[tuple[int, int], int] = {}

    def settle(self, lane: int, remaining: float | None, rung: int) -> None:
        """Between two iterations: its iterations run in this lane from now on.

        ``remaining``: the seconds that it has left if it runs alone, None if that is not known. ``rung``: how often a
        tuner has promoted it. Raises SalusError within an iteration, and after `leave`.
        """
        with self._lock:
            seat = self._table.seat(self._index)
            self._check(seat.state, seat.arrival)
            if seat.state == INSIDE:
                raise SalusError(f"{seat.name!r} is within an iteration; it may change its lane between two")
            self._place(seat, lane, remaining, rung)

    def _place(self, seat: Seat, lane: int, remaining: float | None, rung: int) -> None:
        if seat.lane != lane:
            seat.last_turn, seat.service = self._turns.level(seat.index, lane)
            seat.state, seat.lane, seat.last_s = IDLE, lane, 0.0
        seat.remaining, seat.rung = math.nan if remaining is None else remaining, rung
        self._table.write(seat)

    def _check(self, state: int, arrival: int) -> None:
        if state == AWAY or arrival != self._arrival:
            raise SalusError("this trial has left its device; take a seat anew")

    def iteration(self) -> AbstractContextManager[None]:
        """One iteration: it waits for its turn, and gives the lane back at the end, also if the iteration raises."""
        return self

    def leave(self) -> None:
        """Give up the seat: the trial's memory is free. The last trial removes the table."""
        table, granted = self._table, None
        with self._lock:
            state, arrival, _ = table.place_of(self._index)
            if state != AWAY and arrival == self._arrival:
                granted = self._turns.leave(self._index, time.monotonic())
                table.remove_if_empty()
        if granted is not None:
            self._waker.wake(table, granted)
        self.close()

    def close(self) -> None:
        """Free the descriptors that this gate holds."""
        for fd in self._watched.values():
            os.close(fd)
        self._watched.clear()
        if self._inbox is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._inbox.getsockname())
            self._inbox.close()
            self._inbox = None
        self._waker.close()

    def __enter__(self) -> None:
        if self._inside:
            raise SalusError("this trial is at its gate already; one iteration at a time")
        self._inside, self._began = True, time.monotonic()
        try:
            table = self._table
            with self._lock:
                state, arrival, lane = table.place_of(self._index)
                self._check(state, arrival)
                granted = self._arrive(self._index, lane, self._began)
            if granted != self._index:
                if granted is not None:
                    self._waker.wake(table, granted)
                self._wait()
            self._began = time.monotonic()
        except BaseException:
            # Ctrl-C may come when the lane is ours already.
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """The iteration is over, and with it the use of ephemeral memory. Does nothing if it never began."""
        now = time.monotonic()
        self._inside = False
        table = self._table
        with self._lock:
            state, arrival, lane = table.place_of(self._index)
            if arrival != self._arrival or state != INSIDE:
                return
            woken = self._end_iteration(self._index, lane, now - self._began, now)
        if woken is not None:
            self._waker.wake(table, woken)

    # Waiting

    def _wait(self) -> None:
        table = self._table
        suspicious = False
        try:
            # A trial that chose this one before its inbox exists wakes no process. So this one looks once it has it.
            inbox = self._open_inbox()
            while True:
                now = time.monotonic()
                with table.lock():
                    mine = table.seat(self._index)
                    self._check(mine.state, mine.arrival)
                    mates = table.in_lane(mine.lane)
                    del mates[self._index]
                    if suspicious:
                        bury(table, mates.values())
                    if mine.state == INSIDE:
                        return
                    granted = self._turns.grant(mine.lane, now)
                    if granted == self._index:
                        return
                    kept = self._turns.kept_until(mine.lane, now)
                if granted is not None:
                    self._waker.wake(table, granted)
                timeout = LOOK_S if kept is None else max(0.0, kept - time.monotonic())
                suspicious = self._sleep(inbox, mates.values(), timeout)
        except BaseException:
            # Ctrl-C: no trial may wait for this one. If it is inside by now, `__exit__` follows.
            with table.lock():
                if table.place_of(self._index)[1] == self._arrival:
                    self._turns.stop_waiting(self._index)
            raise

    def _sleep(self, inbox: socket.socket | None, mates: Collection[Seat], timeout: float) -> bool:
        """Sleep until woken, or until a process of the lane died. Returns whether one may have died."""
        poll = select.poll()
        if inbox is not None:
            poll.register(inbox, select.POLLIN)
        wanted = {(seat.pid, seat.start) for seat in mates if seat.pid != os.getpid()}
        for key in self._watched.keys() - wanted:
            os.close(self._watched.pop(key))
        for key in wanted - self._watched.keys():
            try:
                self._watched[key] = os.pidfd_open(key[0])
            except ProcessLookupError:
                return True
            except OSError:
                continue  # it is looked at
        for fd in self._watched.values():
            poll.register(fd, select.POLLIN)
        events = poll.poll(timeout * 1000)
        if inbox is None:
            return True
        with contextlib.suppress(BlockingIOError):
            while inbox.recv(16):
                pass
        return not events or any(fd != inbox.fileno() for fd, _ in events)

    def _open_inbox(self) -> socket.socket | None:
        """The socket at which it is woken; None: there is no room for one now."""
        if self._inbox is None:
            with contextlib.suppress(OSError), contextlib.ExitStack() as unless_bound:
                made = unless_bound.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                made.setblocking(False)
                address = self._table.address(self._index, self._arrival)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(address)
                made.bind(address)
                self._inbox = made
                unless_bound.pop_all()
        return self._inbox


class Waker:
    """Wakes trials that wait at their gates, by datagrams from one socket. It opens at the first use."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def wake(self, table: SeatTable, index: int) -> None:
        _, arrival, _ = table.place_of(index)
        # Where there is no room for a socket, the other one looks. Where no process is there, it has no inbox yet and
        # will look, or it is dead and those who watch it know.
        with contextlib.suppress(OSError):
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
            self._socket.sendto(b"x", table.address(index, arrival))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
