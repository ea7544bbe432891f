"""A worker's part in sharing its device: its trial's memory, its place in a lane, and the gate at every iteration.

Alone on its device a trial only has its memory measured. When the driver says that the device is shared (a `Ticket`
comes with the trial or with its next iteration) it is admitted to a lane by the device's service, held to what it
was promised, and passes the gate; alone again, it leaves. Nothing is decided here: the engine says who shares a
device, the lane service who is admitted, the policy who goes first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from salus_share.client import LaneClient
from salus_share.errors import Refused, SalusError, StaleToken
from salus_share.memory import CONTEXT, CudaMeter, Meter, Profile, ResidentMeter, after_failure, is_out_of_memory
from salus_share.messages import Need
from salus_share.seat_table import RESIDENT, SeatTable, alive, home
from salus_share.trial import SharedTrial

logger = logging.getLogger(__name__)

#: A trial waits so long for room on its device, seconds; then it goes back to the engine's queue.
ADMIT_S = 30.0
#: A lane service that could not be started is tried again after so long, seconds.
RETRY_S = 60.0
#: A trial that was promised this part of its device had all of it.
ALL = 0.99
#: What a process maps on a CPU and never touches: stacks of threads, arenas of the allocator.
SLACK = 256 << 20


@dataclass(frozen=True)
class LaneSettings:
    """How the trials of one device share it.

    ``device``: its name, equal for its workers and for no other device of this node. ``capacity``: bytes that they may
    use together; None: a GPU's but for the contexts of its workers, a core's part of the node's memory. ``cores``: of
    a CPU device. ``workers``: processes that a device may hold.
    """

    device: str
    policy: str
    capacity: int | None
    cores: float
    workers: int = 1


@dataclass(frozen=True)
class Ticket:
    """The trial shares its device from now on.

    ``need``: parts of the device's memory (persistent, ephemeral) that it is likely to need, None: nobody knows;
    ``least``: what it lacked before. ``remaining``: seconds left alone; ``rung``: how often it was promoted.
    """

    need: tuple[float, float] | None
    remaining: float
    rung: int
    least: tuple[float, float] | None = None


@dataclass(frozen=True)
class Lack:
    """The trial cannot go on where it is, for want of memory. ``need``: as in `Ticket`, if it is known better now.

    ``between``: it stands between two iterations, of which nothing is lost.
    """

    reason: str
    need: tuple[float, float] | None = None
    between: bool = False


def is_lane_service(process: psutil.Process) -> bool:
    """Whether a child process is a device's lane service, which belongs to no trial."""
    with contextlib.suppress(psutil.Error):
        return "salus_share.service" in process.cmdline()
    return False


class LaneMember:
    """One trial in this worker, from loading to unloading. ``torch_device``: "cuda" or "cpu"."""

    def __init__(self, trial: str, settings: LaneSettings, torch_device: str) -> None:
        # A process that hosts a trial again before its last one was forgotten is another one to the service.
        self._name = f"{trial}/{os.getpid()}"
        self._settings = settings
        self._torch = _torch_with_cuda() if torch_device == "cuda" else None
        self._meter: Meter = CudaMeter(self._torch.cuda.current_device()) if self._torch else ResidentMeter(SLACK)
        self._profile = Profile(self._meter)
        self._capacity = settings.capacity or self._all_memory()
        self._shared: SharedTrial | None = None
        self._client: LaneClient | None = None
        self._ticket: Ticket | None = None
        self._busy: float | None = None
        #: When a service that could not be had is asked for again, on the monotonic clock.
        self._retry_at = 0.0
        self._hold()

    # What is known

    @property
    def need(self) -> tuple[float, float] | None:
        """Parts of the device's memory, (persistent, ephemeral), as measured; None: not yet."""
        return None if self._profile.usage is None else self._parts(self._profile.usage.need())

    @property
    def busy(self) -> float | None:
        """The part of a CPU device that the last iteration kept busy, 0 to 1; None: not known."""
        return self._busy

    # Sharing

    def settle(self, ticket: Ticket | None) -> Lack | None:
        """Share the device, or, without a ticket, have it alone. Between iterations."""
        if ticket is None:
            if self._shared is not None:
                self.leave()
                self._hold()
            return None
        if self._shared is None and time.monotonic() < self._retry_at:
            return None
        try:
            if self._shared is None:
                self._enter(ticket)
            elif self._client is not None and self._ticket is not None and ticket.rung != self._ticket.rung:
                self._client.progress(ticket.remaining, ticket.rung)
        except TimeoutError:
            self._shared = self._client = None
            return Lack(f"its device had no room for it within {ADMIT_S:.0f} s", between=True)
        except StaleToken as error:
            return Lack(str(error), between=True)
        except Refused as error:
            self.leave()
            return Lack(str(error), self.need, between=True)
        except SalusError as error:
            # Its result does not depend on it: it goes on without, and asks again later.
            logger.warning("FluidTune: trial %s shares its device without a lane: %s", self._name, error)
            self.leave()
            self._retry_at = time.monotonic() + RETRY_S
            return None
        self._ticket = ticket
        return None

    def _enter(self, ticket: Ticket) -> None:
        need = None if ticket.need is None else self._bytes(ticket.need)
        if self._profile.usage is not None:
            need = self._profile.usage.need()
        least = None if ticket.least is None else self._bytes(ticket.least)
        if need is not None and least is not None:
            need = need.at_least(least)
        settings = self._settings
        client = LaneClient(settings.device, self._name, capacity=self._capacity, policy=settings.policy)
        self._shared = SharedTrial(client, self._meter, self._capacity, profile=self._profile, least=least)
        self._client = client
        self._shared.admit(need, remaining=ticket.remaining, rung=ticket.rung, timeout=ADMIT_S)

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """One iteration. Raises StaleToken, before anything ran, if there is no room for the trial any more."""
        worked, began = time.process_time(), time.perf_counter()
        if self._shared is not None:
            with self._shared.iteration():
                yield
                self._empty()
        else:
            self._profile.begin()
            yield
            self._profile.end()
            if self._torch is None:
                took = time.perf_counter() - began
                self._busy = min(1.0, (time.process_time() - worked) / max(1e-9, took * self._settings.cores))

    def refused(self, error: StaleToken) -> Lack:
        """What `iteration` raised, for the driver."""
        promised = self._shared.promised if self._shared is not None else None
        return Lack(str(error), None if promised is None else self._parts(promised), between=True)

    def failed(self, error: BaseException) -> Lack | None:
        """An allocation failed that the trial's share, or others, forbade: what it needs next.

        None: the error is the trial's own. So it is when it had the whole device.
        """
        if not any(map(is_out_of_memory, causes(error))) or (self._shared is None and not self._has_company()):
            return None
        self._meter.lift()
        if self._shared is None:
            return Lack("it ran out of memory outside a lane, on a device that others have joined", self.need)
        promised = self._shared.promised or Need(0, self._capacity)
        if sum(self._parts(promised)) > ALL:
            return None
        need = after_failure(promised, self._capacity)
        return Lack("it ran out of the memory that it was promised", self._parts(need))

    def lift(self) -> None:
        """The trial is on its way out: what it takes to end is not held against it."""
        self._meter.lift()

    def leave(self) -> None:
        """The device is not shared with others, or the trial's memory is free."""
        shared, self._shared, self._client, self._ticket = self._shared, None, None, None
        if shared is not None:
            shared.leave()

    def _has_company(self) -> bool:
        """Whether others are admitted to the device. Who came within an iteration is in no ticket yet."""
        with contextlib.suppress(SalusError):
            table = SeatTable(home(self._settings.device))
            with table.lock():
                seats = table.seats()
            return any(seat.state in RESIDENT and seat.name != self._name and alive(seat) for seat in seats)
        return False

    # Memory

    def _hold(self) -> None:
        """Alone it may have all that its device has; if the user said what that is, no more."""
        if self._settings.capacity is not None:
            self._meter.limit(self._settings.capacity)

    def _empty(self) -> None:
        """Before the lane is given back: what was started is done, and what others of the lane may use is free.

        Also of a lane without others: one may have joined it within this iteration.
        """
        if self._torch is not None:
            self._torch.cuda.synchronize()
            self._meter.give_back()

    def _parts(self, need: Need) -> tuple[float, float]:
        return float(need.persistent) / self._capacity, float(need.ephemeral) / self._capacity

    def _bytes(self, parts: tuple[float, float]) -> Need:
        return Need(int(parts[0] * self._capacity), int(parts[1] * self._capacity))

    def _all_memory(self) -> int:
        if self._torch is not None:
            total = self._torch.cuda.get_device_properties(self._torch.cuda.current_device()).total_memory
            # Warm workers keep their contexts while they serve nobody.
            return int(total) - self._settings.workers * CONTEXT
        return int(_node_memory() * min(1.0, self._settings.cores / (os.cpu_count() or 1)))


def _torch_with_cuda() -> Any:
    """torch, or None where a "gpu" device is one in Ray's books only."""
    import torch

    return torch if torch.cuda.is_available() else None


def _node_memory() -> int:
    """Bytes that this node, or the container that it is, may use."""
    there = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        return min(there, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return there


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it was raised for: Ray wraps what a training function raises."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
