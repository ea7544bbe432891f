"""The gate: every iteration of a trial passes it, microseconds when nobody else wants the lane.

Who passes is decided on the board by the processes themselves, by the device's policy, so that no service stands
between two iterations. At the end of an iteration the trial that leaves hands the lane to the best of those that are
ready and wakes it. A trial that would go again itself keeps the lane for a moment (it *lingers*), because between
two iterations it is away for the time that its next batch takes.

Everyone who waits also watches the processes of its lane (pidfds): when the one inside is killed, they wake at once
and one of them takes the lane. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from contextlib import AbstractContextManager

from salus_share.errors import SalusError, StaleToken
from salus_share.policies import Policy, next_turn, policy
from salus_share.seat_table import (
    ADMITTED,
    IDLE,
    INSIDE,
    LEFT,
    LINGERING,
    PAUSED,
    READY,
    RESIDENT,
    Seat,
    SeatTable,
    alive,
)

#: Longest that a lane is kept for a trial between two of its iterations: this part of the last one, at most so long.
LINGER_PART, LINGER_S = 0.1, 0.005
#: How often one who waits looks by itself, seconds: for what no wake-up tells, such as two deaths at once.
LOOK_S = 0.25


class Gate:
    """The gate of one admitted trial: seat ``index`` of a board, with the token of its admission.

    Not for several threads at once; a process with several trials has one gate each.
    """

    def __init__(self, table: SeatTable, index: int, token: int) -> None:
        self._table = table
        self._index = index
        self.token = token
        self._policy = policy(table.policy)
        #: The lane of the iteration under way, or of the last one, and whether others are in it.
        self.lane = -1
        self.shared = False
        self._pass = _Pass(self)
        self._inside = False
        self._began = 0.0
        self._inbox: socket.socket | None = None
        #: (pid, start) -> its pidfd, of processes that were waited for lately.
        self._watched: dict[tuple[int, int], int] = {}

    def iteration(self) -> AbstractContextManager[None]:
        """One iteration: waits for its turn, and gives the lane back at the end, also if it raises.

        Entering raises StaleToken, before anything ran, if the trial was told to leave the device.
        """
        return self._pass

    def withdraw(self) -> None:
        """Give up the seat: the trial's memory is free. The service finds it so, now or when it is back."""
        table = self._table
        with table.lock():
            mine = table.seat(self._index)
            granted = None
            if mine.token == self.token and mine.state in RESIDENT:
                table.set_state(mine, LEFT)
                granted = grant(table, self._policy, mine.lane)
        if granted is not None:
            wake(table, granted)
        self.close()

    def close(self) -> None:
        """This admission is over."""
        for fd in self._watched.values():
            os.close(fd)
        self._watched.clear()
        if self._inbox is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._inbox.getsockname())
            self._inbox.close()
            self._inbox = None

    def _enter(self) -> None:
        if self._inside:
            raise SalusError("this trial is at its gate already; one iteration at a time")
        self._inside, self._began = True, time.monotonic()
        try:
            table = self._table
            with table.lock():
                state, _, token, self.lane = table.standing_at(self._index)
                self._check(token, state, ADMITTED)
                active, clock = table.mates(self._index, self.lane)
                self.shared = clock is not None
                if clock is not None:
                    table.owe(self._index, clock)
                table.set_state_at(self._index, READY if active else INSIDE)
                passed = not active or self._take()
            if not passed:
                self._wait()
            self._began = time.monotonic()
        except BaseException:
            # Ctrl-C may come when the lane is ours already.
            self._leave()
            raise

    def _leave(self) -> None:
        """The iteration is over, and with it the use of ephemeral memory. Nothing if it never began."""
        now = time.monotonic()
        self._inside = False
        table = self._table
        woken = None
        with table.lock():
            state, paused, token, lane = table.standing_at(self._index)
            if token != self.token or state != INSIDE:
                return
            table.count(self._index, now - self._began)
            active, _ = table.mates(self._index, lane)
            table.set_state_at(self._index, PAUSED if paused else IDLE)
            if active:
                woken = (None if paused else self._linger(lane, now)) or grant(table, self._policy, lane)
        if woken is not None:
            wake(table, woken)

    def _linger(self, lane: int, now: float) -> Seat | None:
        """The lane is kept a moment if this trial would be next. Returns who takes it when the moment is over."""
        table = self._table
        mine = table.seat(self._index)
        ready = {seat.index: seat.standing for seat in in_lane(table, lane) if seat.state == READY}
        if not ready or next_turn(self._policy, {**ready, mine.index: mine.standing}) != mine.index:
            return None
        mine.state, mine.linger_until = LINGERING, now + min(LINGER_S, LINGER_PART * mine.last_s)
        table.write(mine)
        return table.seat(next(iter(ready)))

    def _check(self, token: int, state: int, states: tuple[int, ...]) -> None:
        if token != self.token or state not in states:
            raise StaleToken(
                f"token {self.token} is old: this trial was told to leave the device; "
                "commit, free its memory and ask to be admitted again"
            )

    def _take(self) -> bool:
        """This trial is ready: whether the lane is its now. If it is another's turn, that one gets it."""
        granted = grant(self._table, self._policy, self.lane)
        if granted is not None and granted.index != self._index:
            wake(self._table, granted)
        return granted is not None and granted.index == self._index

    # Waiting

    def _wait(self) -> None:
        table = self._table
        suspicious = False
        try:
            # Whoever chose this trial before the inbox is there wakes nobody: so look after it is.
            inbox = self._open_inbox()
            while True:
                with table.lock():
                    mine = table.seat(self._index)
                    self._check(mine.token, mine.state, (READY, INSIDE))
                    mates = [seat for seat in in_lane(table, mine.lane) if seat.index != mine.index]
                    if suspicious:
                        bury(table, mates)
                    if mine.state == INSIDE or self._take():
                        return
                now = time.monotonic()
                timeout = min([seat.linger_until - now for seat in mates if lingers(seat, now)], default=LOOK_S)
                suspicious = self._sleep(inbox, mates, timeout)
        except BaseException:
            # Ctrl-C, or an old token: nobody may wait for this one. If it is inside by now, `_leave` follows.
            with table.lock():
                mine = table.seat(self._index)
                if mine.token == self.token and mine.state == READY:
                    table.set_state(mine, IDLE)
            raise

    def _sleep(self, inbox: socket.socket, mates: list[Seat], timeout: float) -> bool:
        """Until woken, or until somebody of the lane died. Returns whether somebody may have."""
        poll = select.poll()
        poll.register(inbox, select.POLLIN)
        wanted = {(seat.pid, seat.start) for seat in mates if seat.pid != os.getpid()}
        for key in self._watched.keys() - wanted:
            os.close(self._watched.pop(key))
        for key in wanted - self._watched.keys():
            try:
                self._watched[key] = os.pidfd_open(key[0])
            except ProcessLookupError:
                return True
        for fd in self._watched.values():
            poll.register(fd, select.POLLIN)
        events = poll.poll(timeout * 1000)
        with contextlib.suppress(BlockingIOError):
            while inbox.recv(16):
                pass
        return not events or any(fd != inbox.fileno() for fd, _ in events)

    def _open_inbox(self) -> socket.socket:
        if self._inbox is None:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            made.setblocking(False)
            address = self._table.address(self._index, self.token)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            made.bind(address)
            self._inbox = made
        return self._inbox


class _Pass(AbstractContextManager[None]):
    """What `Gate.iteration` is a `with` of; one a gate, nothing is made anew for an iteration."""

    __slots__ = ("_gate",)

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        self._gate._enter()

    def __exit__(self, *_: object) -> None:
        self._gate._leave()


# What the gate and the service do to a lane; all but `wake` under the board's lock.


def in_lane(table: SeatTable, lane: int) -> list[Seat]:
    """The trials of a lane that may pass the gate."""
    return [seat for seat in table.seats() if seat.lane == lane and seat.state in ADMITTED]


def lingers(seat: Seat, now: float) -> bool:
    """Whether the lane is kept for this trial."""
    return seat.state == LINGERING and seat.linger_until > now


def grant(table: SeatTable, chosen: Policy, lane: int) -> Seat | None:
    """If nobody has the lane, let in the best of those that are ready. Returns it; it may have to be woken."""
    now = time.monotonic()
    seats = in_lane(table, lane)
    if any(seat.state == INSIDE or lingers(seat, now) for seat in seats):
        return None
    ready = {seat.index: seat for seat in seats if seat.state == READY}
    best = next_turn(chosen, {index: seat.standing for index, seat in ready.items()})
    if best is None:
        return None
    table.set_state(ready[best], INSIDE)
    return ready[best]


def bury(table: SeatTable, seats: list[Seat]) -> None:
    """Take the dead out of the lane."""
    for seat in seats:
        if not alive(seat):
            table.set_state(seat, LEFT)


def pause(table: SeatTable, chosen: Policy, index: int) -> list[Seat]:
    """The trial may pass no more: at once, or at the end of the iteration it is in. Returns whom to wake."""
    seat = table.seat(index)
    if seat.state == INSIDE:
        seat.pause = 1
        table.write(seat)
        return []
    if seat.state not in ADMITTED:
        return []
    waits = seat.state == READY
    table.set_state(seat, PAUSED)
    granted = grant(table, chosen, seat.lane)
    return [other for other in (seat if waits else None, granted) if other is not None]


def wake(table: SeatTable, seat: Seat) -> None:
    """Wake a trial that waits at the gate."""
    pid = os.getpid()
    if pid not in _sending:
        _sending[pid] = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        _sending[pid].setblocking(False)
    with contextlib.suppress(OSError):
        # Nobody there: it has no inbox yet and will look, or it is dead and those who watch it know.
        _sending[pid].sendto(b"x", table.address(seat.index, seat.token))


#: By process (one that was forked has its own): the socket that wakes others.
_sending: dict[int, socket.socket] = {}
