"""The checks of `fluidtune doctor`: Python, Ray, torch, Horovod, GPUs and MPS. Each says what it found."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import version

from fluidtune.gpu_checks import Check, gpu_checks


def checks() -> Iterator[Check]:
    """All checks, in the order in which they are shown."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield "python", (3, 10) <= sys.version_info[:2] <= (3, 13), f"{version} (3.10 to 3.13 are supported)"
    yield _ray()
    yield _torch()
    yield _horovod()
    yield from _gpus()
    yield _mps()


def _ray() -> Check:
    try:
        import ray

        from fluidtune.errors import FluidTuneError
        from fluidtune.ray_compat.versions import NEWEST_RAY, OLDEST_RAY, check_ray_version
    except ImportError as error:
        return "ray", False, f'{error}; type: pip install "ray[tune]"'
    try:
        check_ray_version()
    except FluidTuneError as error:
        return "ray", False, str(error)
    return "ray", True, f"{ray.__version__} (tested from {OLDEST_RAY} to {NEWEST_RAY})"


def _torch() -> Check:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return "torch", False, f"{error}; type: pip install torch"
    backends = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    return "torch", "gloo" in backends, f"{torch.__version__}, collectives: {', '.join(backends) or 'none'}"


def _horovod() -> Check:
    """Only ``backend="horovod"`` needs Horovod, so a missing one counts as well."""
    try:
        from fluidtune.elastic.backends.horovod_there import INSTALL_HINT, horovod_missing
    except ImportError as error:
        return "horovod", True, f"not checked ({error})"
    lacking = horovod_missing()
    if lacking is not None:
        return "horovod", True, f'{lacking}; backend="torch" works without it. For backend="horovod" {INSTALL_HINT}'
    try:
        import horovod
        import horovod.torch as hvd

        built = [name for name in ("gloo", "nccl", "mpi") if getattr(hvd, f"{name}_built")()]
    except Exception as error:  # a Horovod that was built for another torch may raise anything
        return "horovod", False, f"does not load ({str(error).splitlines()[0]}): {INSTALL_HINT}"
    found = f"{horovod.__version__}, collectives: {', '.join(built) or 'none'}"
    if "fluidtune" not in version("horovod"):
        found += f"; as released, where a worker that dies at the wrong moment takes the others with it: {INSTALL_HINT}"
    return "horovod", "gloo" in built, found


def _gpus() -> Iterator[Check]:
    try:
        import pynvml
    except ImportError:
        yield "gpu", True, "no telemetry (pynvml is not installed); type: pip install nvidia-ml-py"
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield "gpu", True, f"none on this machine ({error}); jobs run on cpu devices"
        return
    try:
        yield "gpu", True, f"{pynvml.nvmlDeviceGetCount()} on this machine"
        try:
            import torch
        except ImportError:
            torch = None  # type: ignore[assignment]
        yield from gpu_checks(pynvml, torch, shutil.disk_usage("/dev/shm").total)
    finally:
        pynvml.nvmlShutdown()


def _mps() -> Check:
    """Nothing needs MPS, so a missing one counts as well: processes that share a GPU then take time slices."""
    from salus_share.mps import CONTROL

    program = shutil.which(CONTROL)
    return "mps", True, program or f"no {CONTROL} here; with lanes, trials that share a GPU take time slices"
