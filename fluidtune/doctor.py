"""What `fluidtune doctor` looks at."""

from __future__ import annotations

import sys
from collections.abc import Iterator

Check = tuple[str, bool, str]


def checks() -> Iterator[Check]:
    """Each check as (what, whether it is well, what was found and what to type)."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield "python", (3, 10) <= sys.version_info[:2] <= (3, 12), f"{version} (3.10 to 3.12 are supported)"
    yield _ray()
    yield _torch()
    yield _nvml()


def _ray() -> Check:
    try:
        import ray

        from fluidtune.errors import FluidTuneError
        from fluidtune.tune import compat
    except ImportError as error:
        return "ray", False, f'{error}; type: pip install "ray[tune]"'
    try:
        compat.check_ray_version()
    except FluidTuneError as error:
        return "ray", False, str(error)
    return "ray", True, f"{ray.__version__} (tested from {compat.OLDEST_RAY} to {compat.NEWEST_RAY})"


def _torch() -> Check:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return "torch", False, f"{error}; type: pip install torch"
    backends = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    return "torch", "gloo" in backends, f"{torch.__version__}, collectives: {', '.join(backends) or 'none'}"


def _nvml() -> Check:
    try:
        import pynvml
    except ImportError:
        return "gpu", True, "no telemetry (pynvml is not installed); type: pip install nvidia-ml-py"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return "gpu", True, f"none on this machine ({error}); jobs run on cpu devices"
    try:
        count = pynvml.nvmlDeviceGetCount()
        names = {str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in range(count)}
    finally:
        pynvml.nvmlShutdown()
    return "gpu", True, f"{count} ({', '.join(sorted(names))})"
