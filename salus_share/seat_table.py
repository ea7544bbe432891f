"""The board of a device: a few kilobytes of shared memory in which its trials see each other.

One file per device, a seat per trial. Whoever changes it holds its lock: a POSIX record lock, which the kernel
takes from a process that dies (a robust mutex would need C; a flock would live on in a forked data loader). Here is
only how things are written down; who may pass is decided in `gate`, who is admitted by the service.
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
from salus_share.policies import Standing, back

MAGIC, VERSION = 0x5A105, 1
SEATS = 64

#: magic, version, seats in use (high-water mark), tokens, turns, capacity, policy.
_HEADER = struct.Struct("=IIIxxxxQQQ64s")
_SEATS_USED, _TOKENS, _TURNS = 8, 16, 24
_FIRST_SEAT = 128
#: state, pause, token, lane, last turn, service, remaining, last iteration's seconds, linger until, pid, rung, start of
#: the process, persistent, ephemeral, arrival, job. What an iteration changes comes first and together.
_SEAT = struct.Struct("=IIQqQddddIiQqqQ64s")
_SIZE = 192
#: Of these: state, pause, token, lane; and from the fifth on what an iteration counts.
_PASS, _COUNTS, _COUNTS_AT = struct.Struct("=IIQq"), struct.Struct("=Qddd"), 24
_STATE, _TURN = struct.Struct("=I"), struct.Struct("=Q")

FREE, WAITING, IDLE, READY, INSIDE, LINGERING, PAUSED, LEFT = range(8)
#: States in which a seat's memory is in use.
RESIDENT = (IDLE, READY, INSIDE, LINGERING, PAUSED)
#: States in which its token may pass the gate.
ADMITTED = (IDLE, READY, INSIDE, LINGERING)


@dataclass(slots=True)
class Seat:
    """A trial as the board has it, in the order in which it is written.

    ``start``: of its process, in ticks since boot, so that a pid is not mistaken. ``lane``: -1 before admission.
    ``linger_until``: on the monotonic clock; until then the lane is kept for it.
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
        """What a policy sees."""
        remaining = None if math.isnan(self.remaining) else self.remaining
        return Standing(self.arrival, self.service, self.last_turn, remaining, self.rung)


#: Of a seat: what is written between its state and its name.
_values = attrgetter(*[field.name for field in fields(Seat)][2:-1])


def home(device: str) -> Path:
    """The directory of a device's lane service, on this node and of this user."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    return base / f"salus-{os.getuid()}" / device


class SeatTable:
    """The board in ``directory``. `create` makes it; any number of processes open it.

    Every method that changes something needs the lock: ``with table.lock(): ...``.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / "board"
        try:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise SalusError(f"there is no seat table at {path} ({error}); start the device's lane service") from error
        magic, version, _, _, _, self.capacity, policy = _HEADER.unpack_from(self._map)
        if (magic, version) != (MAGIC, VERSION):
            raise SalusError(f"{path} is not a seat table of version {VERSION}; remove it when no trial runs")
        self.policy = policy.rstrip(b"\0").decode()
        self._lock = _lock_of(directory)

    @classmethod
    def create(cls, directory: Path, capacity: int, policy: str) -> SeatTable:
        """Open the board, made first if it is not there. Raises SalusError if it is there with other settings."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = directory / "board"
        if not path.exists():
            fresh = directory / f"board.{os.getpid()}"
            name = policy.encode()
            if len(name) > 64:
                raise SalusError(f"the policy's name {policy!r} is longer than 64 bytes")
            content = _HEADER.pack(MAGIC, VERSION, 0, 0, 0, int(capacity), name)
            fresh.write_bytes(content.ljust(_FIRST_SEAT + SEATS * _SIZE, b"\0"))
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
        """Hold the board, for microseconds. A process that dies here frees it."""
        return self._lock

    # Seats

    def seats(self) -> list[Seat]:
        """All seats that are not free."""
        (used,) = _STATE.unpack_from(self._map, _SEATS_USED)
        return [seat for seat in map(self.seat, range(used)) if seat.state != FREE]

    def seat(self, index: int) -> Seat:
        """One seat, free or not."""
        values = _SEAT.unpack_from(self._map, _FIRST_SEAT + index * _SIZE)
        *numbers, name = values
        return Seat(index, *numbers, name.rstrip(b"\0").decode())  # type: ignore[call-arg]

    def write(self, seat: Seat) -> None:
        """Write all of a seat; its state last, so that a reader after a crash finds it whole or as it was."""
        at = _FIRST_SEAT + seat.index * _SIZE
        (state,) = _STATE.unpack_from(self._map, at)
        _SEAT.pack_into(self._map, at, state, *_values(seat), seat.name.encode())
        self.set_state(seat, seat.state)

    def set_state(self, seat: Seat, state: int) -> None:
        """Change a seat's state, and nothing else."""
        seat.state = state
        _STATE.pack_into(self._map, _FIRST_SEAT + seat.index * _SIZE, state)

    def take_seat(self, name: str, pid: int) -> Seat:
        """A free seat for a trial. Raises SalusError if all are taken."""
        (used,) = _STATE.unpack_from(self._map, _SEATS_USED)
        if len(name.encode()) > 64:
            raise SalusError(f"the trial's name {name!r} is longer than 64 bytes; give it a shorter one")
        index = next((i for i in range(used) if self.seat(i).state == FREE), used)
        if index >= SEATS:
            raise SalusError(f"{SEATS} trials are at this device; {name!r} must go to another one")
        nan = math.nan
        seat = Seat(index, WAITING, 0, 0, -1, 0, 0.0, nan, 0.0, 0.0, pid, 0, started(pid), 0, 0, 0, name)
        self.write(seat)
        struct.pack_into("=I", self._map, _SEATS_USED, max(used, index + 1))
        return seat

    # What every pass does, without making a `Seat` of each

    def standing_at(self, index: int) -> tuple[int, int, int, int]:
        """(state, pause, token, lane) of a seat."""
        return _PASS.unpack_from(self._map, _FIRST_SEAT + index * _SIZE)  # type: ignore[return-value]

    def mates(self, index: int, lane: int) -> tuple[bool, float | None]:
        """Whether another trial of the lane is ready, inside or lingers, and the lane's clock, None without others.

        The clock is the service that whoever of the others began last had then.
        """
        (used,) = _STATE.unpack_from(self._map, _SEATS_USED)
        active, clock = False, None
        for other in range(used):
            if other != index:
                at = _FIRST_SEAT + other * _SIZE
                state, _, _, its = _PASS.unpack_from(self._map, at)
                if its == lane and state in ADMITTED:
                    _, service, _, last = _COUNTS.unpack_from(self._map, at + _COUNTS_AT)
                    began = service if state == INSIDE else service - last
                    clock = began if clock is None else max(clock, began)
                    active = active or state != IDLE
        return active, clock

    def owe(self, index: int, clock: float) -> None:
        """The trial stands at the gate of a lane with this clock: what `policies.back` says, written down."""
        at = _FIRST_SEAT + index * _SIZE + _COUNTS_AT
        turn, service, remaining, last = _COUNTS.unpack_from(self._map, at)
        _COUNTS.pack_into(self._map, at, turn, back(service, clock), remaining, last)

    def count(self, index: int, seconds: float) -> None:
        """An iteration is over: what `policies.served` says, written down."""
        (turn,) = _TURN.unpack_from(self._map, _TURNS)
        _TURN.pack_into(self._map, _TURNS, turn + 1)
        at = _FIRST_SEAT + index * _SIZE + _COUNTS_AT
        _, service, remaining, _ = _COUNTS.unpack_from(self._map, at)
        # max(nan, 0) would be nan or 0, as the order has it: unknown stays unknown.
        left = remaining if remaining != remaining else max(0.0, remaining - seconds)
        _COUNTS.pack_into(self._map, at, turn + 1, service + seconds, left, seconds)

    def set_state_at(self, index: int, state: int) -> None:
        """Change a seat's state, and nothing else."""
        _STATE.pack_into(self._map, _FIRST_SEAT + index * _SIZE, state)

    @property
    def tokens(self) -> int:
        """The last token that was given out."""
        return int(_TURN.unpack_from(self._map, _TOKENS)[0])

    @tokens.setter
    def tokens(self, token: int) -> None:
        _TURN.pack_into(self._map, _TOKENS, token)

    @property
    def turns(self) -> int:
        """Iterations that ended on the device so far."""
        return int(_TURN.unpack_from(self._map, _TURNS)[0])

    def address(self, index: int, token: int) -> str:
        """The socket on which a trial that waits at the gate is woken; of one admission only."""
        return f"{self.directory}/wake-{index}-{token}"


class _Lock(AbstractContextManager[None]):
    """One per board and process: record locks do not hold threads of one process apart, a thread lock does."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
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
    # Closing any descriptor of the file would free the process's lock on it: it is opened once and stays open.
    with _locks_lock:
        key = (os.getpid(), str(directory))
        if key not in _locks:
            _locks[key] = _Lock(directory / "lock")
        return _locks[key]


def started(pid: int) -> int:
    """When a process started, in ticks since boot; 0 if there is none (a zombie is none)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = stat[stat.rindex(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def alive(seat: Seat) -> bool:
    """Whether the seat's process is the one that took it, and runs."""
    return seat.pid != 0 and started(seat.pid) == seat.start
