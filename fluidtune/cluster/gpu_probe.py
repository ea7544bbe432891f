"""What a worker sees of its GPU between two iterations, by torch and NVML. Without a GPU it sees and logs nothing."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from salus_share.telemetry import DeviceSample, Telemetry

#: The least seconds between two looks at a device. NVML's documentation: utilisation is that of the last
#: sixth of a second to second, depending on the product; a shorter period would ask for the same figure again.
SAMPLE_S = 2.0


def torch_on_gpu(torch: Any = None) -> Any | None:
    """torch, if this process computes on a GPU with it, else None. ``torch``: None is the module that is imported."""
    torch = torch or sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def cuda_failure(torch: Any = None) -> str | None:
    """What CUDA has said since an error that ended its context; None: it works, or this process computes on no GPU.

    NVIDIA's documentation of the runtime, cudaErrorAssert and its like: after such an error the process must end before
    CUDA can be used again. ``torch``: see `torch_on_gpu`. It waits for the GPU.
    """
    torch = torch_on_gpu(torch)
    if torch is None:
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def wait_for_gpu() -> None:
    """Wait until the GPU has done what was asked of it, so that an iteration's time is the GPU's as well."""
    cuda_failure()  # whether the trial's code meets a failure depends on what it does next


def memory_needed() -> float | None:
    """The part of the device's memory that torch has needed in this process so far; None: not known."""
    torch = torch_on_gpu()
    if torch is None:
        return None
    device = torch.cuda.current_device()
    needed: float = torch.cuda.max_memory_reserved(device)
    return needed / torch.cuda.get_device_properties(device).total_memory


class GpuProbe:
    """One worker's look at the GPU that it trains on. ``telemetry``: None opens NVML when it is first needed."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self._telemetry = telemetry
        self._next = 0.0

    def sample(self, torch: Any = None) -> DeviceSample | None:
        """The GPU now. None without a GPU, within `SAMPLE_S` of the last look, and where NVML does not know the GPU.

        ``torch``: see `torch_on_gpu`.
        """
        now = time.monotonic()
        torch = torch_on_gpu(torch) if now >= self._next else None
        if torch is None:
            return None
        self._next = now + SAMPLE_S
        if self._telemetry is None:
            self._telemetry = Telemetry()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).removeprefix("GPU-")
        found = (sample for sample in self._telemetry.sample() if sample.uuid.removeprefix("GPU-") == uuid)
        return next(found, None)

    def memory_of_process(self, pid: int) -> int | None:
        """The bytes of GPU memory that a process holds, by NVML; None: it has no GPU, or NVML does not know it."""
        if not os.environ.get("CUDA_VISIBLE_DEVICES"):
            return None
        if self._telemetry is None:
            self._telemetry = Telemetry()
        held = [sample.processes[pid] for sample in self._telemetry.sample() if pid in sample.processes]
        return sum(held) if held else None
