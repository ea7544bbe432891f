"""A worker's part in sharing its device: its trial's memory, its seat in a lane, and the gate at every iteration.

While a trial has its device alone, only its memory is measured. When the driver says that the device is shared (by a
`LaneTicket` with the trial or with its next iteration), the worker takes a seat in the lane that the ticket names. From
then on the trial is held to what it was promised and passes the gate. When it is alone again, it leaves the lane.
Nothing is decided here: the engine decides which trials share a device, in which lanes, and what each is promised, and
the policy which goes first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import psutil

from fluidtune.cluster.data.node_files import NAME
from fluidtune.device_kinds import KINDS
from fluidtune.errors import FluidTuneError
from salus_share.errors import SalusError
from salus_share.gate import Gate
from salus_share.lanes import Need, outgrown
from salus_share.memory import (
    CONTEXT,
    Meter,
    Profile,
    ResidentMeter,
    after_failure,
    is_out_of_memory,
    memory_left,
)
from salus_share.seat_table import SeatTable, alive, home

logger = logging.getLogger(__name__)

#: How long after a failure a trial asks for a seat again, seconds.
RETRY_S = 60.0
#: A trial that was promised at least this part of its device is taken to have had all of it.
ALL = 0.99
#: The contexts of a GPU's workers must leave at least this part of it to their trials. Judgement: beside a GPU that is
#: full of contexts trials would train one after the other, and a trial's part of what is left may not even be finite.
LEFT = 0.1
#: The bytes that a process on a CPU maps and never touches: stacks of threads, arenas of the allocator. 32 stacks of 8
#: MiB.
SLACK = 256 << 20


@dataclass(frozen=True)
class LaneSettings:
    """How the trials of one device share it.

    ``device``: its name, the same for all of its workers, and different from the other devices of its node.
    ``policy``: the name of the lane policy. ``capacity``: the bytes that its trials may use together; None: all of a
    GPU's memory except the contexts of its workers, or the part of the node's memory that belongs to the cores of a CPU
    device. ``cores``: the cores of a CPU device. ``workers``: the most processes that the device holds.
    """

    device: str
    policy: str
    capacity: int | None
    cores: float
    workers: int = 1


@dataclass(frozen=True)
class LaneTicket:
    """The trial shares its device from now on.

    ``lane``: its lane there. ``promised``: the parts of the device's memory (persistent, ephemeral) that it may use.
    ``remaining``: the seconds that it has left if it runs alone. ``rung``: how often it was promoted.
    """

    lane: int
    promised: tuple[float, float]
    remaining: float
    rung: int


@dataclass(frozen=True)
class Eviction:
    """The trial cannot go on where it is, for want of memory, of a GPU that works, or of further devices.

    ``need``: the parts of the device's memory (persistent, ephemeral) that it needs, if that is known better now.
    ``between``: whether the trial is between two iterations, so that no work is lost. ``broken``: the place, among the
    trial's devices, of the one that cannot be used any more; None: all can. ``devices``: how many devices it needs, if
    it has too few.
    """

    reason: str
    need: tuple[float, float] | None = None
    between: bool = False
    broken: int | None = None
    devices: int | None = None


class LaneMember:
    """One trial in this worker, from its loading to its unloading. ``kind``: that of its device.

    Raises FluidTuneError if the contexts of the GPU's workers leave its trials less than `LEFT` of it.
    """

    def __init__(self, trial: str, settings: LaneSettings, kind: str) -> None:
        self._trial = trial
        self._settings = settings
        of_kind = KINDS[kind]
        #: torch's module of the device, such as ``torch.cuda``. None for cores, and where torch finds no such device.
        self._gpu: Any = _module_of(of_kind.torch) if of_kind.meter else None
        self._meter: Meter = ResidentMeter(SLACK, NAME)
        if self._gpu is not None:
            self._meter = resolve_name(of_kind.meter)(self._gpu.current_device())
        self._profile = Profile(self._meter)
        self._capacity = settings.capacity or self._all_memory()
        #: What it is held to, and its seat; None while it has the device alone. It may be without a seat, see `_sit`.
        self._promised: Need | None = None
        self._gate: Gate | None = None
        #: The lane and the rung of its seat.
        self._place: tuple[int, int] | None = None
        #: The part of a CPU device that the last iteration kept busy, 0 to 1; None if it is not known.
        self.compute: float | None = None
        #: When it asks for a seat again after a failure, on the monotonic clock.
        self._retry_at = 0.0
        self._hold()

    # What was measured

    @property
    def need(self) -> tuple[float, float] | None:
        """The parts of the device's memory (persistent, ephemeral) that it was measured to need; None if not yet."""
        return None if self._profile.usage is None else self._parts(self._profile.usage.need())

    # Sharing

    def settle(self, ticket: LaneTicket | None) -> Eviction | None:
        """Share the device as the ticket says, or have it alone without one. Called between two iterations.

        Returns what it lacks, if it was measured to need more than it is promised: it is told before it fails.
        """
        if ticket is None:
            if self._promised is not None:
                self.leave()
                self._hold()
            return None
        promised = self._bytes(ticket.promised)
        usage = self._profile.usage
        if usage is not None and outgrown(promised, usage.need()):
            need = self._parts(usage.need().at_least(promised))
            return Eviction("it needs more memory than there is for it beside others", need, between=True)
        if promised != self._promised:
            # Memory that it cached while it was alone, or had more, may be another trial's now.
            self._meter.give_back()
            self._promised = promised
            self._meter.limit(int(promised.persistent) + int(promised.ephemeral))
        self._sit(ticket)
        return None

    def _sit(self, ticket: LaneTicket) -> None:
        """Take the seat of the ticket. Where none is to be had, the trial goes on without its turns, and asks later."""
        place, lane, remaining, rung = (ticket.lane, ticket.rung), ticket.lane, ticket.remaining, ticket.rung
        if self._place == place or (self._gate is None and time.monotonic() < self._retry_at):
            return
        try:
            if self._gate is not None:
                self._gate.settle(lane, remaining, rung)
            else:
                where, policy = home(self._settings.device), self._settings.policy
                self._gate = Gate(where, self._trial, policy, lane=lane, remaining=remaining, rung=rung)
            self._place = place
        except (SalusError, OSError) as error:
            # Its result does not depend on turns.
            logger.warning("FluidTune: trial %s shares its device without a lane: %s", self._trial, error)
            self._gate = self._place = None
            self._retry_at = time.monotonic() + RETRY_S

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """One iteration. It waits for its turn if the device is shared."""
        worked, began = time.process_time(), time.perf_counter()
        self._profile.begin()
        if self._promised is not None:
            with contextlib.nullcontext() if self._gate is None else self._gate.iteration():
                yield
                self._empty()
            self._profile.end()
            return
        yield
        self._profile.end()
        if self._gpu is None:
            took = time.perf_counter() - began
            self.compute = min(1.0, (time.process_time() - worked) / max(1e-9, took * self._settings.cores))

    def failed(self, error: BaseException) -> Eviction | None:
        """What to tell the driver if memory ran out because of the trial's share, or because of other trials.

        None: the error is the trial's own, for instance because it had the whole device.
        """
        memory = memory_left(self._gpu)
        if not (self._meter.is_full() or any(is_out_of_memory(each, memory and memory[0]) for each in causes(error))):
            return None
        promised = self._promised
        if promised is None and not self._has_company():
            return None
        self._meter.lift()
        if promised is None:
            return Eviction("it ran out of memory outside a lane, on a device that others have joined", self.need)
        if sum(self._parts(promised)) > ALL:
            return None
        need = after_failure(promised, self._capacity)
        return Eviction("it ran out of the memory that it was promised", self._parts(need))

    def lift(self) -> None:
        """Remove the limit: the trial ends, and may need more memory for that."""
        self._meter.lift()

    def leave(self) -> None:
        """Leave the lane: the device is not shared any more, or the trial's memory is free."""
        gate, self._gate, self._place = self._gate, None, None
        if self._promised is not None:
            self._promised = None
            self._meter.lift()
        if gate is not None:
            gate.leave()

    def _has_company(self) -> bool:
        """Whether other trials are on the device. No ticket has told yet of those that came within an iteration."""
        with contextlib.suppress(SalusError):
            return any(map(alive, SeatTable(home(self._settings.device)).seats()))
        return False

    # Memory

    def _hold(self) -> None:
        """Alone, it may have all of its device's memory, or as much as the user allowed."""
        if self._settings.capacity is not None:
            self._meter.limit(self._settings.capacity)

    def _empty(self) -> None:
        """Before the lane is given back, finish the work on the GPU and free the memory that other trials may use.

        This is done in a lane without other trials too: one may have joined it within this iteration.
        """
        if self._gpu is not None:
            self._gpu.synchronize()
            self._meter.give_back()

    def _parts(self, need: Need) -> tuple[float, float]:
        return float(need.persistent) / self._capacity, float(need.ephemeral) / self._capacity

    def _bytes(self, parts: tuple[float, float]) -> Need:
        return Need(int(parts[0] * self._capacity), int(parts[1] * self._capacity))

    def _all_memory(self) -> int:
        if self._gpu is not None:
            total = int(self._gpu.get_device_properties(self._gpu.current_device()).total_memory)
            # A worker that will serve another trial keeps its context.
            left = total - self._settings.workers * CONTEXT
            if left < LEFT * total:
                raise _too_many(self._settings, total)
            return left
        return int(node_memory() * min(1.0, self._settings.cores / (os.cpu_count() or 1)))


def _too_many(settings: LaneSettings, total: int) -> FluidTuneError:
    """What to say where the contexts of a GPU's workers fill it. ``total``: its bytes."""
    # A trial needs its own context once more: its measured memory has it, wherever the trial runs.
    most = total // (2 * CONTEXT)
    advice = f"at most {most} fit; ask for a larger part of a GPU per trial" if most > 1 else "leave lanes out"
    return FluidTuneError(
        f"lanes={settings.policy!r} with {settings.workers} trials on a GPU of {total >> 20} MiB: their CUDA contexts, "
        f"{CONTEXT >> 20} MiB each, fill it; {advice}, or set a smaller max_packing"
    )


def _module_of(device: str) -> Any:
    """torch's module of this type of devices, or None where Ray counts one but torch finds none."""
    import torch

    module = getattr(torch, device)
    return module if module.is_available() else None


def node_memory() -> int:
    """The bytes that this node may use, or this container if it is one."""
    there = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        return min(there, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return there


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes: Ray wraps what a training function raises."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
