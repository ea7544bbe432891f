"""How much memory a trial takes, found while it runs, and the limit that keeps it to its share.

P is what a trial holds at an iteration boundary, with what the framework took before there was a model. E is the peak
within iterations beyond P (dissertation, sections 2.2.1 and 2.3.2.1). On a GPU torch's allocator and NVML give both, on
a CPU the process' resident memory does. Only `CudaMeter` imports torch.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from salus_share.errors import SalusError
from salus_share.lanes import MARGIN, Amount, Need
from salus_share.telemetry import Telemetry

#: A trial that ran out of its share gets this part of the share added to E: a second failure costs more than memory
#: that it gives back.
AFTER_FAILURE = 0.5
#: The first `FIRST` iterations are measured one by one, later ones in groups of `GROUP`; no peak is missed. The
#: first iterations allocate what stays, and later ones do not differ.
FIRST, GROUP = 3, 10
#: The bytes that a CUDA context is taken to hold where NVML cannot say, and for each worker that may come to a device
#: with lanes: all of its workers must name the same capacity, so none can name it by what it has measured. Measured
#: with cuBLAS on an H200 by ``benchmarks.gpu.probes context``: 676 to 684 MiB (docs/results/gpu-h200-probes.jsonl).
CONTEXT = 700 << 20

#: What failed allocations are called by torch and CuPy (OutOfMemoryError) and TensorFlow (ResourceExhaustedError).
_MEMORY_ERRORS = ("OutOfMemoryError", "ResourceExhaustedError")
#: What is in the messages of failed allocations, by NVIDIA's documentation of cuBLAS, cuDNN, cuSOLVER, cuSPARSE and
#: cuFFT (CUBLAS_STATUS_ALLOC_FAILED and so on), of the runtime and of the driver; of XLA's status codes; and of C++.
_MEMORY_WORDS = (
    "_ALLOC_FAILED",
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "RESOURCE_EXHAUSTED",
    "std::bad_alloc",
)
#: What NVIDIA's libraries say when they cannot be started, by the same documentation. It has several causes; on a GPU
#: that is full it is that. (Their first call allocates a handle with its workspace.)
_NOT_STARTED = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUSOLVER_STATUS_INTERNAL_ERROR",
    "CUSPARSE_STATUS_NOT_INITIALIZED",
    "CUFFT_INTERNAL_ERROR",
)
#: Bytes of a thread's stack, by Linux's default (getrlimit(2), RLIMIT_STACK).
STACK = 8 << 20
#: Bytes that are free on a full GPU at most: a library's handle and workspace take 8 to 64 MiB.
FULL = 64 << 20


@dataclass(frozen=True)
class Usage:
    """What was measured, in bytes.

    ``framework``: libraries and contexts. ``model``: what is held at a boundary beyond that. ``ephemeral``: the peak
    within iterations beyond both.
    """

    framework: int
    model: int
    ephemeral: int

    def need(self) -> Need:
        """What to ask for: `MARGIN` more than was measured."""
        return Need(round((self.framework + self.model) * (1 + MARGIN)), round(self.ephemeral * (1 + MARGIN)))


class Meter(Protocol):
    """Measures the memory of this process, or of one trial in it."""

    def reset(self) -> None:
        """Forget the peak, and measure it anew from now on."""

    def read(self) -> Usage:
        """Read between two iterations what is held now, and the peak since `reset`."""

    def limit(self, share: int) -> None:
        """Make allocations beyond ``share`` bytes (P + E) fail, in this trial alone."""

    def lift(self) -> None:
        """Remove the limit."""

    def give_back(self) -> None:
        """Free for other processes what the allocator keeps and does not use."""

    def is_full(self) -> bool:
        """Whether the limit leaves so little that an error, whatever it says, is taken for one of memory."""


class ResidentMeter:
    """Resident memory of this process. What it holds when this is made is the framework's: make it before the model.

    Of pages that it shares with others at that moment, as a forked process does with its parent, it counts its part.

    The limit is RLIMIT_DATA, which the kernel applies to this process only: an allocation fails (MemoryError in Python,
    RuntimeError in torch), and no other process notices. Linux only.

    ``slack``: bytes beyond the share before allocations fail. The limit counts what is mapped and not what is resident,
    such as 8 MiB for a thread's stack of which kilobytes are touched. ``apart``: the name of files in memory
    (memfd_create(2)) that all trials map and none has alone, such as ``memfd:data``. Of them it counts what this
    process has changed, and the limit leaves room for all of them.
    """

    def __init__(self, slack: int = 0, apart: str | None = None) -> None:
        self._slack = slack
        self._apart = None if apart is None else f"/{apart}"
        resident, size = self._of_all()
        self._begun = self._now() - resident
        self._framework = min(self._begun, _proportional())
        self._data = _status("VmData") - size

    def reset(self) -> None:
        # "5" resets the peak of resident memory, and nothing else (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> Usage:
        now = self._now()
        peak = max(now, _status("VmHWM"))
        # Where there is no shared memory, the list of mappings need not be read: it takes a millisecond.
        of_all = self._of_all()[0] if _status("RssShmem") else 0
        return Usage(self._framework, max(0, now - of_all - self._begun), peak - now)

    def limit(self, share: int) -> None:
        # The framework's part of the share is in use already.
        allowed = self._data + self._of_all()[1] + self._slack + max(0, share - self._framework)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))

    def lift(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def give_back(self) -> None:
        """Nothing to do: the C library has given it back."""

    def is_full(self) -> bool:
        """Whether a thread's stack does not fit any more: libraries say then what they like ("cannot start thread")."""
        allowed, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return allowed != resource.RLIM_INFINITY and allowed - _status("VmData") < STACK

    def _of_all(self) -> tuple[int, int]:
        """The bytes of the files apart: those in memory that this process has not changed, and those that are mapped.

        The kernel counts a mapping's bytes for the limit if it is private and may be written to.
        """
        if self._apart is None or self._apart not in Path("/proc/self/maps").read_text():
            return 0, 0
        resident, size, counts = 0, 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            field, *rest = line.split()
            if not field.endswith(":"):
                counts = len(rest) > 4 and rest[4] == self._apart
                if counts and rest[0][1] + rest[0][3] == "wp":
                    first, last = field.split("-")
                    size += int(last, 16) - int(first, 16)
            elif counts and field in ("Rss:", "Anonymous:"):
                resident += (int(rest[0]) << 10) * (1 if field == "Rss:" else -1)
        return resident, size

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def beside_allocator(cuda: Any, device: int, telemetry: Telemetry) -> int | None:
    """The bytes of a GPU that this process holds beside torch's allocator; None: NVML cannot say.

    Or it speaks of another process: pids in a container are not those that the driver knows. ``cuda``: torch's module.
    """
    held = telemetry.process_memory(str(cuda.get_device_properties(device).uuid), os.getpid())
    beside = 0 if held is None else held - cuda.memory_reserved(device)
    return beside if beside > 0 else None


class CudaMeter:
    """One process' memory on one CUDA device, by torch's allocator.

    The framework's part is what the process holds beyond the allocator, by NVML if it can say: the context, and the
    kernels that were loaded so far (CUDA loads a kernel when it first runs). Every reading asks NVML (``telemetry``).
    """

    def __init__(self, device: int = 0, telemetry: Telemetry | None = None) -> None:
        import torch

        self._torch = torch
        self._device = device
        torch.cuda.init()
        self._total = torch.cuda.get_device_properties(device).total_memory
        self._telemetry = telemetry or Telemetry()
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

    def is_full(self) -> bool:
        """No: torch's allocator names its failures, and other libraries' are read off what the GPU has left."""
        return False

    def _look(self) -> None:
        self._framework = beside_allocator(self._torch.cuda, self._device, self._telemetry) or self._framework


class Profile:
    """A trial's memory over its iterations, the first ones one by one, later ones in groups (`FIRST`, `GROUP`)."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._iterations = 0
        #: The last measurement; None before there was one.
        self.usage: Usage | None = None

    def begin(self) -> None:
        if self._iterations < FIRST or self._iterations % GROUP == 0:
            self._meter.reset()

    def end(self) -> None:
        """An iteration is over: memory is read if it was the last of a group."""
        self._iterations += 1
        # The first iteration allocates what stays (optimizer state), so its E is too large.
        if 1 < self._iterations <= FIRST or self._iterations % GROUP == 0:
            self.usage = self._meter.read()


def after_failure(promised: Need, capacity: Amount) -> Need:
    """What a trial that ran out of its share asks for, before it goes back to its last commit.

    Raises SalusError if it had the whole device.
    """
    room = int(capacity) - int(promised.persistent)
    if int(promised.ephemeral) >= room:
        raise SalusError(
            f"it ran out of memory with {promised.persistent} + {promised.ephemeral} bytes, which is the whole device; "
            "give it a smaller batch or model, or a larger device"
        )
    more = max(1, round(AFTER_FAILURE * (float(promised.persistent) + float(promised.ephemeral))))
    return Need(promised.persistent, min(room, int(promised.ephemeral) + more))


def is_out_of_memory(error: BaseException, free: int | None = None) -> bool:
    """Whether an allocation failed: Python's, torch's on a CPU, CUDA's, or a library's that allocates by itself.

    ``free``: the bytes that the GPU had left after the error; None: there is no GPU, or it was not asked.
    """
    if isinstance(error, MemoryError) or type(error).__name__ in _MEMORY_ERRORS:
        return True
    text = str(error)
    if isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text):
        return True
    words = _MEMORY_WORDS if free is None or free > FULL else _MEMORY_WORDS + _NOT_STARTED
    return isinstance(error, Exception) and any(each in text for each in words)


def memory_left(gpu: Any) -> tuple[int, int] | None:
    """The bytes of the GPU that are free, and all of them; None without a GPU, or where it cannot be used any more.

    ``gpu``: torch's module of it, such as ``torch.cuda``, where torch computes on it, else None.
    """
    if gpu is None:
        return None
    try:
        free, total = gpu.mem_get_info()
    except RuntimeError:
        return None
    return int(free), int(total)


def _proportional() -> int:
    """Bytes that this process holds, of shared pages its part ("Pss" in proc(5)). Without the file: all are its own."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return sys.maxsize
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {field}")
