"""How much memory a trial takes, found while it runs, and the limit that keeps it to its share.

P is what it holds at an iteration boundary, with what the framework took before there was a model; E is the peak
within iterations minus that (dissertation, sections 2.2.1 and 2.3.2.1). On a GPU torch's allocator and NVML say so,
on a CPU the process' resident memory. What is promised to the trial is `MARGIN` more than was measured; it asks for
more when half of that is used up, which is before it fails. Only the meters touch torch, and only when used.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from salus_share.errors import Refused
from salus_share.lanes import Amount
from salus_share.messages import Need

#: What is promised beyond what was measured: fragments, and iterations that differ a little.
MARGIN = 0.1
#: What is added to E for a trial that ran out of its share: this part of all of it.
AFTER_FAILURE = 0.5
#: A promise this many times larger than the need is given back.
TOO_MUCH = 1.5
#: The first iterations are measured one by one, later ones in groups of so many; no peak is missed.
FIRST, GROUP = 3, 10
#: What a CUDA context takes where NVML cannot say, bytes.
CONTEXT = 600 << 20


@dataclass(frozen=True)
class Usage:
    """What was measured, bytes. ``framework``: libraries and contexts; ``model``: held at a boundary beside that;
    ``ephemeral``: the peak within iterations beside both."""

    framework: int
    model: int
    ephemeral: int

    def need(self, margin: float = MARGIN) -> Need:
        """What to ask for."""
        return Need(round((self.framework + self.model) * (1 + margin)), round(self.ephemeral * (1 + margin)))


class Meter(Protocol):
    """Measures the memory of this process, or of one trial in it."""

    def reset(self) -> None:
        """Forget the peak: from here on it is measured anew."""

    def read(self) -> Usage:
        """At an iteration boundary: what is held now, and the peak since `reset`."""

    def limit(self, share: int) -> None:
        """Make allocations beyond ``share`` bytes of P + E fail, in this trial alone."""

    def lift(self) -> None:
        """No limit any more."""

    def give_back(self) -> None:
        """What the allocator keeps and nobody uses is free for other processes."""


class ResidentMeter:
    """Resident memory of this process. What it had at construction is the framework's: make it before the model.

    The limit is RLIMIT_DATA, which the kernel holds against this process only: malloc fails (MemoryError in Python,
    RuntimeError in torch), nobody else notices. Linux only.

    ``slack``: bytes beyond the share before allocations fail. The limit counts what is mapped and not what is resident:
    8 MiB for a thread's stack of which kilobytes are touched.
    """

    def __init__(self, slack: int = 0) -> None:
        self._slack = slack
        self._framework = self._now()
        self._data = _status("VmData")

    def reset(self) -> None:
        # 5: the peak of resident memory only (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> Usage:
        now = self._now()
        peak = max(now, _status("VmHWM"))
        return Usage(self._framework, max(0, now - self._framework), peak - now)

    def limit(self, share: int) -> None:
        # Of what it may have, the framework's part is taken already.
        allowed = self._data + self._slack + max(0, share - self._framework)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))

    def lift(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def give_back(self) -> None:
        """The C library has given it back."""

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class CudaMeter:
    """One process' memory on one CUDA device, by torch's allocator.

    The framework's part is what the process holds beyond that, by NVML if it can say: its context, and the kernels that
    were loaded so far (CUDA loads them when they first run). It is asked for at every reading.
    """

    def __init__(self, device: int = 0) -> None:
        import torch

        from salus_share.telemetry import Telemetry

        self._torch = torch
        self._device = device
        torch.cuda.init()
        self._total = torch.cuda.get_device_properties(device).total_memory
        self._uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._telemetry = Telemetry()
        self._framework = CONTEXT
        self._look()

    def reset(self) -> None:
        self._torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> Usage:
        now = self._torch.cuda.memory_allocated(self._device)
        self._look()
        return Usage(self._framework, now, self._torch.cuda.max_memory_allocated(self._device) - now)

    def limit(self, share: int) -> None:
        part = min(1.0, max(0, share - self._framework) / self._total)
        self._torch.cuda.set_per_process_memory_fraction(part, self._device)

    def lift(self) -> None:
        self._torch.cuda.set_per_process_memory_fraction(1.0, self._device)

    def give_back(self) -> None:
        self._torch.cuda.empty_cache()

    def _look(self) -> None:
        held = self._telemetry.process_memory(self._uuid, os.getpid())
        if held is not None:
            self._framework = max(0, held - self._torch.cuda.memory_reserved(self._device))


class Profile:
    """A trial's memory over its iterations: the first ones by themselves, later ones in groups; no peak is missed."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._iterations = 0
        #: What was measured last; None before there was anything.
        self.usage: Usage | None = None

    def begin(self) -> None:
        """An iteration begins."""
        if self._iterations < FIRST or self._iterations % GROUP == 0:
            self._meter.reset()

    def end(self) -> Usage | None:
        """It is over. What was measured, if this was the last of a group."""
        self._iterations += 1
        if self._iterations > FIRST and self._iterations % GROUP:
            return None
        measured = self._meter.read()
        # The first iteration makes what stays (optimizer state), so what it says of E is too much.
        if self._iterations > 1:
            self.usage = measured
        return measured

    @property
    def first(self) -> bool:
        """Only one iteration is over."""
        return self._iterations == 1


def ask_for(measured: Usage, promised: Need | None) -> Need | None:
    """What to ask for now, None if the promise is right.

    More, when half of the margin is used up; less, when the promise is far too large or was made without measuring
    (``promised`` None).
    """
    if promised is None:
        return measured.need()
    tight, ample = measured.need(MARGIN / 2), measured.need()
    if tight.persistent > promised.persistent or tight.ephemeral > promised.ephemeral:
        return Need(max(ample.persistent, promised.persistent), max(ample.ephemeral, promised.ephemeral))
    if float(promised.persistent) + float(promised.ephemeral) > TOO_MUCH * _total(ample):
        return ample
    return None


def after_failure(promised: Need, capacity: Amount) -> Need:
    """What a trial asks for that ran out of its share, before it goes back to its last commit.

    Raises Refused if it had the whole device.
    """
    room = int(capacity) - int(promised.persistent)
    if int(promised.ephemeral) >= room:
        raise Refused(
            f"it ran out of memory with {promised.persistent} + {promised.ephemeral} bytes, all that the device has; "
            "give it a smaller batch or model, or a larger device"
        )
    more = max(1, round(AFTER_FAILURE * _total(promised)))
    return Need(promised.persistent, min(room, int(promised.ephemeral) + more))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: Python's, torch's on a CPU, or CUDA's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


def _total(need: Need) -> float:
    return float(need.persistent) + float(need.ephemeral)


def _status(field: str) -> int:
    """A line of /proc/self/status, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {field}")
