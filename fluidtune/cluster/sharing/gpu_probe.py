"""What a worker sees of its device between two iterations: of a GPU by torch and NVML, and of cores nothing."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from typing import Any

from fluidtune.cluster.sharing.lanes import Eviction, causes
from fluidtune.device_kinds import KINDS, started
from fluidtune.error_lines import first_line
from salus_share.memory import CONTEXT, beside_allocator, is_out_of_memory, memory_left
from salus_share.telemetry import DeviceSample, Telemetry

#: The least seconds between two looks at a device. NVML's documentation: utilisation is that of the last
#: sixth of a second to second, depending on the product; a shorter period would ask for the same figure again.
SAMPLE_S = 2.0
#: Bytes of a GPU's memory that others hold at least where another process computes on it. A CUDA context takes 300 to
#: 700 MiB; what a driver or MPS keeps for itself is less (71 MiB on an H200).
NEIGHBOUR = 256 << 20
#: What CUDA says on a GPU in compute mode Exclusive Process that another process is on: cudaErrorDevicesUnavailable in
#: the documentation of its runtime.
BUSY = "busy or unavailable"
#: What CUDA says when hardware fails, and no program: cudaErrorECCUncorrectable and cudaErrorNvlinkUncorrectable in the
#: documentation of its runtime.
HARDWARE = ("uncorrectable ECC error", "uncorrectable NVLink error")
#: What torch raises when CUDA has no memory for the context of a process: cudaErrorMemoryAllocation in CUDA's
#: documentation. Of an allocation for a tensor torch's own allocator says more.
NO_CONTEXT = "CUDA error: out of memory"


def _squeezed_by(others: int) -> Eviction | None:
    """What to tell the driver where memory ran out while other processes held ``others`` bytes; None: too few."""
    if others < NEIGHBOUR:
        return None
    return Eviction(f"its GPU's memory ran out, of which others held {others >> 20} MiB", (1.0, 0.0))


def _cuda() -> Any | None:
    """torch's module of CUDA, if this process computes on a GPU with it, else None."""
    return started().get("cuda")


def failure_of_device() -> str | None:
    """What torch has said since an error that ended its use of an accelerator; None: it works, or there is none.

    NVIDIA's documentation of the runtime, cudaErrorAssert and its like: after such an error the process must end before
    CUDA can be used again. It waits for the device.
    """
    try:
        for each in started().values():
            each.synchronize()
    except RuntimeError as error:
        return first_line(error)
    return None


def free_device() -> None:
    """Give back the memory of accelerators that this process does not use any more."""
    for each in started().values():
        gc.collect()  # prepared modules hold themselves, by their hooks
        with suppress(RuntimeError):  # after a failure of CUDA
            each.empty_cache()


def wait_for_device() -> None:
    """Wait until the device has done what was asked of it, so that an iteration's time is the device's as well."""
    failure_of_device()  # whether the trial's code meets a failure depends on what it does next


class Probe:
    """One worker's look at the device that it trains on. This one sees nothing, as of cores."""

    def sample(self) -> DeviceSample | None:
        """The device now. None in most iterations, and where nothing is known of it."""

    def memory_needed(self) -> float | None:
        """The part of the device's memory that this process has needed for its trial; None: not known."""

    def kind(self) -> str | None:
        """The product name of this process' device; None: not known."""

    def lost(self) -> Eviction | None:
        """What to tell the driver if a device of this process is lost; None: it is not known to be."""

    def broken(self, error: BaseException) -> Eviction | None:
        """What to tell the driver if ``error`` was raised because hardware failed; None: it has not."""

    def squeezed(self, error: BaseException) -> Eviction | None:
        """What to tell the driver if ``error`` says that the device's memory ran out while other processes held some.

        Or that it admits one process only. None: it is another error, or the trial had all of the memory.
        """


class GpuProbe(Probe):
    """Of an NVIDIA GPU. ``telemetry``: None opens NVML when it is first needed.

    The GPUs are those of CUDA_VISIBLE_DEVICES when it is made.
    """

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self._telemetry = telemetry
        said = os.environ.get(str(KINDS["gpu"].visible), "")
        self._gpus = [gpu.strip() for gpu in said.split(",") if gpu.strip()]
        self._next = 0.0
        #: The most bytes that this process was seen to hold beside torch's allocator; None: NVML has not said.
        self._context: int | None = None
        self._next_context = 0.0

    def sample(self) -> DeviceSample | None:
        """The GPU now. None without a GPU, within `SAMPLE_S` of the last look, and where NVML does not know the GPU."""
        now = time.monotonic()
        cuda = _cuda() if now >= self._next else None
        if cuda is None:
            return None
        self._next = now + SAMPLE_S
        uuid = str(cuda.get_device_properties(cuda.current_device()).uuid).removeprefix("GPU-")
        found = (sample for sample in self._nvml().sample() if sample.uuid.removeprefix("GPU-") == uuid)
        return next(found, None)

    def memory_needed(self) -> float | None:
        """The part of the memory that this process has needed: what torch reserved at most, and the context with all
        that libraries allocate by themselves. Processes that share a GPU have one each.
        """
        cuda = _cuda()
        if cuda is None:
            return None
        device = cuda.current_device()
        total = cuda.get_device_properties(device).total_memory
        needed = cuda.max_memory_reserved(device) + (self._look_at_context(cuda) or CONTEXT)
        return float(min(1.0, needed / total))

    def kind(self) -> str | None:
        """The GPU's product name. None: as for `_only_gpu`."""
        gpu = self._only_gpu()
        return None if gpu is None else gpu.name

    def _only_gpu(self) -> DeviceSample | None:
        """What NVML says of this process' GPU; None: it has none, several, or NVML does not know it."""
        if len(self._gpus) != 1:
            return None
        wanted = self._gpus[0].removeprefix("GPU-")
        found = self._nvml().sample()
        return next((gpu for gpu in found if wanted in (str(gpu.index), gpu.uuid.removeprefix("GPU-"))), None)

    def lost(self) -> Eviction | None:
        """What to tell the driver if NVML says that a GPU of this process is lost."""
        ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        for place, gpu in enumerate(self._gpus):
            why = self._nvml().lost(gpu, ordered)
            if why is not None:
                return Eviction(f"NVML says of GPU {gpu}: {why}", broken=place)
        return None

    def broken(self, error: BaseException) -> Eviction | None:
        """What to tell the driver if hardware failed. Which of several GPUs has lost memory is not known: then None."""
        if not self._gpus:
            return None
        said = next((str(each) for each in causes(error) if any(words in str(each) for words in HARDWARE)), None)
        if said is not None and len(self._gpus) == 1:
            return Eviction(f"the hardware of GPU {self._gpus[0]} has failed: {said.strip().splitlines()[0]}", broken=0)
        return self.lost()

    def _nvml(self) -> Telemetry:
        if self._telemetry is None:
            self._telemetry = Telemetry()
        return self._telemetry

    def squeezed(self, error: BaseException) -> Eviction | None:
        """What to tell the driver if others hold the memory, or the GPU's compute mode admits one process."""
        if any(BUSY in str(each) for each in causes(error)):
            return Eviction(
                f"another process is on its GPU, which admits one: nvidia-smi -c DEFAULT ({error})", (1.0, 0.0)
            )
        cuda: Any = _cuda()
        memory = memory_left(cuda)
        if memory is None and any(NO_CONTEXT in str(each) for each in causes(error)):
            # Without room for a context CUDA cannot say what is free, and this process holds nothing.
            gpu = self._only_gpu()
            return None if gpu is None else _squeezed_by(gpu.memory_used)
        if memory is None or not any(is_out_of_memory(each, memory[0]) for each in causes(error)):
            return None
        free, total = memory
        own = cuda.memory_reserved() + (self._look_at_context(cuda, now=True) or CONTEXT)
        return _squeezed_by(total - free - own)

    def _look_at_context(self, cuda: Any, now: bool = False) -> int | None:
        """The most that the process held beside torch's allocator, by NVML, which is asked every `SAMPLE_S` or now."""
        moment = time.monotonic()
        if now or moment >= self._next_context:
            self._next_context = moment + SAMPLE_S
            beside = beside_allocator(cuda, cuda.current_device(), self._nvml())
            self._context = max(filter(None, (self._context, beside)), default=None)
        return self._context
