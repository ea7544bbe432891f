"""The seat table of a device: a few kilobytes of shared memory in which its trials see each other.

There is one file per device, with one seat per trial. The process of a trial takes the seat itself; the first one makes
the file, and the last one that leaves removes it. Whoever changes the table holds its lock. The lock is a POSIX record
lock, because the kernel takes it from a process that dies. (A robust mutex would need C; a `flock` would live on in a
forked data loader.) This module decides nothing, it only records: whose iteration runs is decided in `turns`.
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
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path

from salus_share.errors import SalusError
from salus_share.packing import SEATS
from salus_share.policies import Standing
from salus_share.private_files import check_directory, open_own
from salus_share.turns import AWAY, IDLE, INSIDE, LINGERING, Counts, Seats

MAGIC, VERSION = 0x5A105, 3
#: The name of the table's file, in the device's directory. Older versions have the same, so that trials of both never
#: share a device by two tables.
FILE = "board"
#: The most bytes of a policy's name. Of a trial's name, which is for people only, as many are stored.
NAME = 64

#: The header: magic, version, seats in use (high-water mark), arrivals, turns, the pid namespace, policy.
_HEADER = struct.Struct(f"=III4xQQQ{NAME}s")
#: Where three of these are, in bytes from the beginning; and where the first seat is.
_SEATS_USED, _ARRIVALS, _TURNS, _FIRST_SEAT = 8, 16, 24, 128
#: A seat: the fields of `Seat` but for its index. What an iteration changes comes first and together.
_SEAT = struct.Struct(f"=IiQqQddddQi4x{NAME}s")
#: Bytes from one seat to the next.
_SIZE = _SEAT.size
#: Parts of a seat: its first four fields (state, pid, arrival, lane), and from byte 24 on the next four (`Counts`).
_PASS, _COUNTS, _COUNTS_AT = struct.Struct("=IiQq"), struct.Struct("=Qddd"), 24
_STATE, _COUNT = struct.Struct("=I"), struct.Struct("=Q")


@dataclass(slots=True)
class Seat:
    """One trial's seat, its fields in the order in which they are stored.

    ``arrival``: its number among all that ever took a seat here, so that a later trial on the same seat is not mistaken
    for it. ``last_turn``, ``service``, ``last_s``: as in `turns.Counts`. ``remaining``: seconds left, NaN if unknown.
    ``linger_until``: on the monotonic clock. ``start``: when its process started, in ticks since boot, so that a pid
    which is used again is not mistaken for it.
    """

    index: int
    state: int
    pid: int
    arrival: int
    lane: int
    last_turn: int
    service: float
    remaining: float
    last_s: float
    linger_until: float
    start: int
    rung: int
    name: str

    @property
    def standing(self) -> Standing:
        remaining = None if math.isnan(self.remaining) else self.remaining
        return Standing(self.arrival, self.service, self.last_turn, remaining, self.rung)


#: The values of a seat's fields between its state and its name.
_values = attrgetter(*[field.name for field in fields(Seat)][2:-1])


def home(device: str) -> Path:
    """The directory of a device on this node, for this user: its seat table, its lock, and sockets."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    return base / f"salus-{os.getuid()}" / device


class SeatTable(Seats[int]):
    """The seat table in ``directory``. `create` makes it; any number of processes open it.

    Every method that changes something needs the lock: ``with table.lock(): ...``. It is the `turns.Seats` of real
    trials, by the index of their seats.

    Raises:
        SalusError: there is no table, or it is another user's, of another version, or of another container's processes.
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
            raise SalusError(f"there is no seat table at {path} ({error})") from error
        magic, version, _, _, _, namespace, policy = _HEADER.unpack_from(self._map)
        if (magic, version) != (MAGIC, VERSION):
            raise SalusError(f"{path} is not a seat table of version {VERSION}; remove it when no trial runs")
        if namespace != _pid_namespace():
            raise SalusError(f"{path} is of another container's processes, whose ends are not seen from here")
        self.policy = policy.rstrip(b"\0").decode()
        self._lock = lock_of(directory)

    @classmethod
    def create(cls, directory: Path, policy: str) -> SeatTable:
        """Open the table, or make it if there is none. The caller has `lock_of` the directory, which is its own.

        Raises:
            SalusError: as above, or the table has another policy.
            OSError: there is no room for it.
        """
        path, fresh, name = directory / FILE, directory / f"{FILE}.new", policy.encode()
        if len(name) > NAME:
            raise SalusError(f"the policy's name {policy!r} is longer than {NAME} bytes; give it a shorter one")
        if not path.exists():
            content = _HEADER.pack(MAGIC, VERSION, 0, 0, 0, _pid_namespace(), name)
            fresh.unlink(missing_ok=True)  # of a process that was killed here
            try:
                with open(open_own(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                    file.write(content.ljust(_FIRST_SEAT + SEATS * _SIZE, b"\0"))
                fresh.rename(path)
            except OSError:
                fresh.unlink(missing_ok=True)
                raise
        table = cls(directory)
        if table.policy != policy:
            raise SalusError(
                f"the trials of {directory.name} take turns by {table.policy}, asked for was {policy}; "
                "use the same policy, or wait until they are done"
            )
        return table

    def lock(self) -> AbstractContextManager[None]:
        """Hold the table, for microseconds. The kernel frees it when a process dies that holds it."""
        return self._lock

    # Seats

    def seats(self) -> list[Seat]:
        """All seats that a trial has."""
        (used,) = _STATE.unpack_from(self._map, _SEATS_USED)
        return [seat for seat in map(self.seat, range(used)) if seat.state != AWAY]

    def seat(self, index: int) -> Seat:
        """One seat, whether a trial has it or not."""
        values = _SEAT.unpack_from(self._map, _FIRST_SEAT + index * _SIZE)
        stored = [index, *values[:-1], values[-1].rstrip(b"\0").decode(errors="replace")]
        return Seat(*stored)

    def write(self, seat: Seat) -> None:
        """Write all of a seat. Its state is written last: after a crash the seat is found whole, or as it was."""
        at = _FIRST_SEAT + seat.index * _SIZE
        (state,) = _STATE.unpack_from(self._map, at)
        _SEAT.pack_into(self._map, at, state, *_values(seat), seat.name.encode())
        self.set_state(seat.index, seat.state)

    def free_seat(self, name: str) -> Seat:
        """A seat for a trial of this process. It is the trial's when it is written with another state than AWAY.

        Raises SalusError if there is none. The seats of processes that are dead are free.
        """
        bury(self, self.seats())
        (used,) = _STATE.unpack_from(self._map, _SEATS_USED)
        index = next((i for i in range(used) if self.place_of(i)[0] == AWAY), used)
        if index >= SEATS:
            raise SalusError(f"{SEATS} trials are at this device; {name!r} must go to another one")
        (arrivals,) = _COUNT.unpack_from(self._map, _ARRIVALS)
        _COUNT.pack_into(self._map, _ARRIVALS, arrivals + 1)
        _STATE.pack_into(self._map, _SEATS_USED, max(used, index + 1))
        pid = os.getpid()
        return Seat(index, AWAY, pid, arrivals + 1, -1, 0, 0.0, math.nan, 0.0, 0.0, started(pid), 0, name)

    def place_of(self, index: int) -> tuple[int, int, int]:
        """(state, arrival, lane) of a seat. A quicker `seat`: every pass asks it."""
        state, _, arrival, lane = _PASS.unpack_from(self._map, _FIRST_SEAT + index * _SIZE)
        return state, arrival, lane

    def remove_if_empty(self) -> None:
        """Remove the file if no trial has a seat."""
        bury(self, self.seats())
        if not self.seats():
            (self.directory / FILE).unlink(missing_ok=True)

    # What `turns.Seats` asks for

    def in_lane(self, lane: int) -> dict[int, Seat]:
        return {seat.index: seat for seat in self.seats() if seat.lane == lane}

    def others(self, index: int, lane: int) -> tuple[bool, float | None]:
        (used,) = _STATE.unpack_from(self._map, _SEATS_USED)
        busy, clock = False, None
        for other in range(used):
            if other != index:
                at = _FIRST_SEAT + other * _SIZE
                state, _, _, its_lane = _PASS.unpack_from(self._map, at)
                if its_lane == lane and state:
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
                if its_lane == lane and state and state != IDLE:
                    return True
        return False

    def counts(self, index: int) -> Counts:
        return _COUNTS.unpack_from(self._map, _FIRST_SEAT + index * _SIZE + _COUNTS_AT)

    def set_counts(self, index: int, counts: Counts) -> None:
        _COUNTS.pack_into(self._map, _FIRST_SEAT + index * _SIZE + _COUNTS_AT, *counts)

    def record_iteration(self, index: int, service: float, remaining: float, seconds: float) -> None:
        (turns,) = _COUNT.unpack_from(self._map, _TURNS)
        _COUNT.pack_into(self._map, _TURNS, turns + 1)
        at = _FIRST_SEAT + index * _SIZE + _COUNTS_AT
        _COUNTS.pack_into(self._map, at, turns + 1, service, remaining, seconds)

    def set_state(self, index: int, state: int) -> None:
        _STATE.pack_into(self._map, _FIRST_SEAT + index * _SIZE, state)

    def set_lingering(self, index: int, until: float) -> None:
        seat = self.seat(index)
        seat.state, seat.linger_until = LINGERING, until
        self.write(seat)

    @property
    def turns(self) -> int:
        return int(_COUNT.unpack_from(self._map, _TURNS)[0])

    def address(self, index: int, arrival: int) -> str:
        """The path of the socket on which a trial that waits at the gate is woken. Each arrival has its own."""
        return f"{self.directory}/wake-{index}-{arrival}"


def bury(table: SeatTable, seats: Iterable[Seat]) -> None:
    """Take the trials whose process is dead off the device. Under the table's lock."""
    for seat in seats:
        if not alive(seat):
            table.set_state(seat.index, AWAY)
            with contextlib.suppress(OSError):
                os.unlink(table.address(seat.index, seat.arrival))


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


def lock_of(directory: Path) -> AbstractContextManager[None]:
    """The lock of the table in this directory, which is there."""
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


def _pid_namespace() -> int:
    """The number of the namespace in which this process sees others: containers on one machine have different ones."""
    return os.stat("/proc/self/ns/pid").st_ino
