"""The seat table of a device: a few kilobytes of shared memory in which its trials see each other.

There is one file per device, with one seat per trial. Whoever changes the table holds its lock. The lock is a POSIX
record lock, because the kernel takes it from a process that dies. (A robust mutex would need C; a `flock` would live
on in a forked data loader.) This module decides nothing, it only records: whose iteration runs is decided in `turns`,
who is admitted in `admission`.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import struct
import tempfile
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path

from salus_share.errors import SalusError
from salus_share.packing import SEATS
from salus_share.policies import Standing
from salus_share.private_files import check_directory, open_own, own_directory
from salus_share.turns import ADMITTED, IDLE, INSIDE, LINGERING, PAUSED, READY, Counts, Seats

MAGIC, VERSION = 0x5A105, 2
#: The name of the table's file, in the device's directory. Older versions have the same, so that trials of both never
#: share a device by two tables.
FILE = "board"
#: The most bytes of a policy's name, and of a trial's.
NAME = 64

#: The header: magic, version, seats in use (high-water mark), tokens, turns, capacity, policy.
_HEADER = struct.Struct(f"=IIIxxxxQQQ{NAME}s")
#: Where three of these are, in bytes from the beginning; and where the first seat is.
_SEATS_USED, _TOKENS, _TURNS, _FIRST_SEAT = 8, 16, 24, 128
#: A seat: the fields of `Seat` but for its index. What an iteration changes comes first and together.
_SEAT = struct.Struct(f"=IIQqQddddIiQqqQ{NAME}s")
#: Bytes from one seat to the next.
_SIZE = 192
#: Parts of a seat: its first four fields (state, pause, token, lane), and from byte 24 on the next four (`Counts`).
_PASS, _COUNTS, _COUNTS_AT = struct.Struct("=IIQq"), struct.Struct("=Qddd"), 24
_STATE, _TURN = struct.Struct("=I"), struct.Struct("=Q")
#: The largest pid and rung that a seat holds: both are stored in four bytes, with a sign.
LARGEST = (1 << 31) - 1

#: The states of a seat beyond those in `turns`: no trial has it; its trial waits for admission; its trial has freed its
#: memory, which the service has not seen yet; there is room for its trial, which has not taken it (`claim`).
FREE, WAITING, LEFT, OFFERED = 0, 1, 7, 8
#: The states in which a seat's memory is in use.
RESIDENT = (IDLE, READY, INSIDE, LINGERING, PAUSED)


@dataclass(slots=True)
class Seat:
    """One trial's seat, its fields in the order in which they are stored.

    ``pause``: 1 if the trial must leave the device after the iteration that it is in. ``lane``: -1 before admission.
    ``last_turn``, ``service``, ``last_s``: as in `turns.Counts`. ``remaining``: seconds left, NaN if unknown.
    ``linger_until``: on the monotonic clock. ``start``: when its process started, in ticks since boot, so that a pid
    which is used again is not mistaken for it. ``persistent``, ``ephemeral``: bytes that it was promised.
    """

    index: int
    state: int
    pause: int
    token: int
    lane: int
    last_turn: int
    service: float
    remaining: float
    last_s: float
    linger_until: float
    pid: int
    rung: int
    start: int
    persistent: int
    ephemeral: int
    arrival: int
    name: str

    @property
    def standing(self) -> Standing:
        remaining = None if math.isnan(self.remaining) else self.remaining
        return Standing(self.arrival, self.service, self.last_turn, remaining, self.rung)


#: The values of a seat's fields between its state and its name.
_values = attrgetter(*[field.name for field in fields(Seat)][2:-1])


def home(device: str) -> Path:
    """The directory of a device on this node, for this user: its seat table, its lane service and their sockets."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    return base / f"salus-{os.getuid()}" / device


class SeatTable(Seats[int]):
    """The seat table in ``directory``. `create` makes it; any number of processes open it.

    Every method that changes something needs the lock: ``with table.lock(): ...``. It is the `turns.Seats` of real
    trials, by the index of their seats.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / FILE
        try:
            check_directory(directory)
            descriptor = open_own(path, os.O_RDWR)
            try:
                self._map = mmap.mmap(descriptor, 0)
            finally:
                os.close(descriptor)
        except SalusError:
            raise
        except (OSError, ValueError) as error:
            raise SalusError(f"there is no seat table at {path} ({error}); start the device's lane service") from error
        magic, version, _, _, _, self.capacity, policy = _HEADER.unpack_from(self._map)
        if (magic, version) != (MAGIC, VERSION):
            raise SalusError(f"{path} is not a seat table of version {VERSION}; remove it when no trial runs")
        self.policy = policy.rstrip(b"\0").decode()
        self._lock = _lock_of(directory)

    @classmethod
    def create(cls, directory: Path, capacity: int, policy: str) -> SeatTable:
        """Open the table, or make it if there is none. Raises SalusError if it is there with other settings."""
        path = own_directory(directory) / FILE
        if not path.exists():
            fresh = directory / f"{FILE}.{os.getpid()}"
            name = policy.encode()
            if len(name) > NAME:
                raise SalusError(f"the policy's name {policy!r} is longer than {NAME} bytes")
            content = _HEADER.pack(MAGIC, VERSION, 0, 0, 0, int(capacity), name)
            fresh.unlink(missing_ok=True)  # of a process with this pid that was killed here
            with open(open_own(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(content.ljust(_FIRST_SEAT + SEATS * _SIZE, b"\0"))
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
            fresh.unlink()
        table = cls(directory)
        if (table.capacity, table.policy) != (int(capacity), policy):
            raise SalusError(
                f"the lanes of {directory.name} are {table.capacity} bytes under {table.policy}, asked for were "
                f"{int(capacity)} under {policy}; use the same settings, or wait until its trials are done"
            )
        return table

    def lock(self) -> AbstractContextManager[None]:
        """Hold the table, for microseconds. The kernel frees it when a process dies that holds it."""
        return self._lock

    # Seats

    def seats(self) -> list[Seat]:
        """All seats that are not free."""
        (used,) = _STATE.unpack_from(self._map, _SEATS_USED)
        return [seat for seat in map(self.seat, range(used)) if seat.state != FREE]

    def seat(self, index: int) -> Seat:
        """One seat, free or not."""
        values = _SEAT.unpack_from(self._map, _FIRST_SEAT + index * _SIZE)
        stored = [index, *values[:-1], values[-1].rstrip(b"\0").decode()]
        return Seat(*stored)

    def write(self, seat: Seat) -> None:
        """Write all of a seat. Its state is written last: after a crash the seat is found whole, or as it was."""
        at = _FIRST_SEAT + seat.index * _SIZE
        (state,) = _STATE.unpack_from(self._map, at)
        _SEAT.pack_into(self._map, at, state, *_values(seat), seat.name.encode())
        self.set_state(seat.index, seat.state)

    def take_seat(self, name: str, pid: int) -> Seat:
        """Give a trial a free seat.

        Raises SalusError if there is none, its name is too long, or its process has ended; OSError if nobody can tell.
        """
        (used,) = _STATE.unpack_from(self._map, _SEATS_USED)
        if len(name.encode()) > NAME:
            raise SalusError(f"the trial's name {name!r} is longer than {NAME} bytes; give it a shorter one")
        index = next((i for i in range(used) if self.seat(i).state == FREE), used)
        if index >= SEATS:
            raise SalusError(f"{SEATS} trials are at this device; {name!r} must go to another one")
        start = started(pid)
        if not start:
            raise SalusError(f"process {pid} of {name!r} has ended, or is not to be seen from process {os.getpid()}")
        nan = math.nan
        seat = Seat(index, WAITING, 0, 0, -1, 0, 0.0, nan, 0.0, 0.0, pid, 0, start, 0, 0, 0, name)
        self.write(seat)
        struct.pack_into("=I", self._map, _SEATS_USED, max(used, index + 1))
        return seat

    def claim(self, index: int, token: int) -> bool:
        """A trial takes the room that it was offered. False: the offer is not there any more, and it must ask anew."""
        seat = self.seat(index)
        if seat.token != token or seat.state != OFFERED:
            return False
        self.set_state(index, LEFT if seat.pause else IDLE)
        return not seat.pause

    def admission_of(self, index: int) -> tuple[int, int, int, int]:
        """(state, pause, token, lane) of a seat. A quicker `seat`: every pass asks it."""
        state, pause, token, lane = _PASS.unpack_from(self._map, _FIRST_SEAT + index * _SIZE)
        return state, pause, token, lane

    # What `turns.Seats` asks for

    def in_lane(self, lane: int) -> dict[int, Seat]:
        return {seat.index: seat for seat in self.seats() if seat.lane == lane and seat.state in ADMITTED}

    def others(self, index: int, lane: int) -> tuple[bool, float | None]:
        (used,) = _STATE.unpack_from(self._map, _SEATS_USED)
        busy, clock = False, None
        for other in range(used):
            if other != index:
                at = _FIRST_SEAT + other * _SIZE
                state, _, _, its_lane = _PASS.unpack_from(self._map, at)
                if its_lane == lane and state in ADMITTED:
                    _, service, _, last_s = _COUNTS.unpack_from(self._map, at + _COUNTS_AT)
                    busy = busy or state != IDLE
                    began = service if state == INSIDE else service - last_s
                    if clock is None or began > clock:
                        clock = began
        return busy, clock

    def busy(self, index: int, lane: int) -> bool:
        (used,) = _STATE.unpack_from(self._map, _SEATS_USED)
        for other in range(used):
            if other != index:
                state, _, _, its_lane = _PASS.unpack_from(self._map, _FIRST_SEAT + other * _SIZE)
                if its_lane == lane and state != IDLE and state in ADMITTED:
                    return True
        return False

    def counts(self, index: int) -> Counts:
        return _COUNTS.unpack_from(self._map, _FIRST_SEAT + index * _SIZE + _COUNTS_AT)

    def set_counts(self, index: int, counts: Counts) -> None:
        _COUNTS.pack_into(self._map, _FIRST_SEAT + index * _SIZE + _COUNTS_AT, *counts)

    def record_iteration(self, index: int, service: float, remaining: float, seconds: float) -> None:
        (turns,) = _TURN.unpack_from(self._map, _TURNS)
        _TURN.pack_into(self._map, _TURNS, turns + 1)
        at = _FIRST_SEAT + index * _SIZE + _COUNTS_AT
        _COUNTS.pack_into(self._map, at, turns + 1, service, remaining, seconds)

    def set_state(self, index: int, state: int) -> None:
        _STATE.pack_into(self._map, _FIRST_SEAT + index * _SIZE, state)

    def set_lingering(self, index: int, until: float) -> None:
        seat = self.seat(index)
        seat.state, seat.linger_until = LINGERING, until
        self.write(seat)

    def set_leaving(self, index: int) -> None:
        seat = self.seat(index)
        seat.pause = 1
        self.write(seat)

    @property
    def turns(self) -> int:
        return int(_TURN.unpack_from(self._map, _TURNS)[0])

    # The rest

    @property
    def tokens(self) -> int:
        """The last token that was given out on the device."""
        return int(_TURN.unpack_from(self._map, _TOKENS)[0])

    @tokens.setter
    def tokens(self, token: int) -> None:
        _TURN.pack_into(self._map, _TOKENS, token)

    def address(self, index: int, token: int) -> str:
        """The path of the socket on which a trial that waits at the gate is woken. Each admission has its own."""
        return f"{self.directory}/wake-{index}-{token}"


class _Lock(AbstractContextManager[None]):
    """The lock of one seat table in one process.

    A record lock does not keep threads of one process apart, so a thread lock goes with it.
    """

    def __init__(self, path: Path) -> None:
        self._fd = open_own(path, os.O_RDWR | os.O_CREAT)
        self._threads = threading.Lock()

    def __enter__(self) -> None:
        self._threads.acquire()
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        self._threads.release()


_locks: dict[tuple[int, str], _Lock] = {}
_locks_lock = threading.Lock()


def _lock_of(directory: Path) -> _Lock:
    # Closing any descriptor of the file frees the process's lock on it. So the file is opened once and stays open.
    with _locks_lock:
        key = (os.getpid(), str(directory))
        if key not in _locks:
            _locks[key] = _Lock(directory / "lock")
        return _locks[key]


def started(pid: int) -> int:
    """When a process started, in ticks since boot; 0 if there is no such process, or it is a zombie.

    Raises OSError if nobody can tell: this process has no descriptor left.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = stat[stat.rindex(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def alive(seat: Seat) -> bool:
    """Whether the process that took the seat runs. It is taken to run while nobody can tell."""
    try:
        return started(seat.pid) == seat.start != 0
    except OSError:
        return True
