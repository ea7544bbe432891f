"""What a worker sees of its GPU between two iterations, by torch and NVML. Without a GPU it sees and logs nothing."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from fluidtune.cluster.lanes import Lack, causes
from salus_share.memory import CONTEXT, is_out_of_memory, memory_left
from salus_share.telemetry import DeviceSample, Telemetry

#: The least seconds between two looks at a device. NVML's documentation: utilisation is that of the last
#: sixth of a second to second, depending on the product; a shorter period would ask for the same figure again.
SAMPLE_S = 2.0
#: Bytes of a GPU's memory that others hold at least where another process computes on it. Judgement: a CUDA context
#: takes 300 to 600 MiB; what a driver or MPS keeps for itself is less.
NEIGHBOUR = 256 << 20
#: What CUDA says on a GPU in compute mode Exclusive Process that another process is on: cudaErrorDevicesUnavailable in
#: the documentation of its runtime.
BUSY = "busy or unavailable"


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


class GpuProbe:
    """One worker's look at the GPU that it trains on. ``telemetry``: None opens NVML when it is first needed."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self._telemetry = telemetry
        self._next = 0.0
        #: The most bytes that this process was seen to hold beside torch's allocator; None: NVML has not said.
        self._context: int | None = None
        self._next_context = 0.0

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

    def memory_needed(self, torch: Any = None) -> float | None:
        """The part of the GPU's memory that this process has needed for its trial; None: not known, or no GPU.

        It is what torch reserved at most, and the context with all that libraries allocate by themselves: processes
        that share a GPU have one each. ``torch``: see `torch_on_gpu`.
        """
        torch = torch_on_gpu(torch)
        if torch is None:
            return None
        device = torch.cuda.current_device()
        total = torch.cuda.get_device_properties(device).total_memory
        needed = torch.cuda.max_memory_reserved(device) + (self._look_at_context(torch) or CONTEXT)
        return float(min(1.0, needed / total))

    def squeezed(self, error: BaseException, torch: Any = None) -> Lack | None:
        """What to tell the driver if ``error`` says that the GPU's memory ran out while other processes held some.

        Or that the GPU, by its compute mode, admits one process only. None: it is another error, or the trial had all
        of the memory that its GPU has. ``torch``: see `torch_on_gpu`.
        """
        if any(BUSY in str(each) for each in causes(error)):
            return Lack(f"another process is on its GPU, which admits one: nvidia-smi -c DEFAULT ({error})", (1.0, 0.0))
        torch = torch_on_gpu(torch)
        memory = memory_left(torch)
        if memory is None or not any(is_out_of_memory(each, memory[0]) for each in causes(error)):
            return None
        free, total = memory
        own = torch.cuda.memory_reserved() + (self._look_at_context(torch, now=True) or 0)
        others = total - free - own
        if others < NEIGHBOUR:
            return None
        return Lack(f"its GPU's memory ran out, of which others held {others >> 20} MiB", (1.0, 0.0))

    def _look_at_context(self, torch: Any, now: bool = False) -> int | None:
        """The most that the process held beside torch's allocator, by NVML, which is asked every `SAMPLE_S` or now."""
        moment = time.monotonic()
        if now or moment >= self._next_context:
            self._next_context = moment + SAMPLE_S
            if self._telemetry is None:
                self._telemetry = Telemetry()
            device = torch.cuda.current_device()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            held = self._telemetry.process_memory(uuid, os.getpid())
            if held is not None:
                self._context = max(self._context or 0, held - torch.cuda.memory_reserved(device))
        return self._context

    def memory_of_process(self, pid: int) -> int | None:
        """The bytes of GPU memory that a process holds, by NVML; None: it has no GPU, or NVML does not know it."""
        if not os.environ.get("CUDA_VISIBLE_DEVICES"):
            return None
        if self._telemetry is None:
            self._telemetry = Telemetry()
        held = [sample.processes[pid] for sample in self._telemetry.sample() if pid in sample.processes]
        return sum(held) if held else None
