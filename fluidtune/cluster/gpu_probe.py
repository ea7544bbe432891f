"""What a worker sees of its GPU by NVML, between two iterations; nothing, and no noise, where there is none."""

from __future__ import annotations

import sys
import time
from typing import Any

from salus_share.telemetry import DeviceSample, Telemetry

#: A device is not looked at more often than this, seconds.
SAMPLE_S = 2.0


def torch_on_gpu(torch: Any = None) -> Any | None:
    """torch, if this process computes on a GPU with it. ``torch``: the module, if not the one that is imported."""
    torch = torch or sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


class GpuProbe:
    """One worker's look at the GPU that it trains on. ``telemetry``: None opens NVML when it is first needed."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self._telemetry = telemetry
        self._next = 0.0

    def sample(self, torch: Any = None) -> DeviceSample | None:
        """The GPU now; None where there is none, it was just looked at, or NVML does not know it.

        ``torch``: the module, if not the one that this process has imported.
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
