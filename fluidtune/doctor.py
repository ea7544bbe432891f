"""The checks of `fluidtune doctor`: what FluidTune needs, and what it can use. Each says what it found.

What is absent and not needed is neither well nor missing.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from fluidtune.gpu_checks import Check, gpu_checks

#: The part of a disk from which on Ray warns, and makes no files for objects that have no room in memory:
#: ``local_fs_capacity_threshold`` in Ray's ray_config_def.h (Ray 2.44 to 2.60).
RAYS_DISK = 0.95
#: Bytes of /dev/shm that NCCL, data loaders and Ray's object store may need. NVIDIA's documentation of NCCL
#: says to start containers with --shm-size=1g, as Docker's 64 MiB are too few.
SHARED_MEMORY = 1 << 30


def checks() -> Iterator[Check]:
    """All checks, in the order of the command's lines."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield "python", (3, 10) <= sys.version_info[:2] <= (3, 13), f"{version} (3.10 to 3.13 are supported)"
    yield _ray()
    yield _cluster()
    yield disk_check("Ray", os.environ.get("RAY_TMPDIR", "/tmp"))
    yield disk_check("results", "~/ray_results")
    yield memory_check(shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None)
    yield _torch()
    yield _forks()
    yield _horovod()
    yield _serve()
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


def _cluster() -> Check:
    """A job joins the cluster that runs here, and begins one of its own where there is none."""
    try:
        import ray

        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ImportError as error:
        return "cluster", None, f"not looked for ({error})"
    except Exception as error:  # ConnectionError, or what a cluster of another version says
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return "cluster", None, f"none to join, so a job begins one of its own ({first})"
    try:
        has = ray.cluster_resources()
        nodes = sum(node["Alive"] for node in ray.nodes())
        said = f"{nodes} {'node' if nodes == 1 else 'nodes'}, {has.get('CPU', 0):g} CPUs, {has.get('GPU', 0):g} GPUs"
    finally:
        ray.shutdown()
    return "cluster", True, f"{said}; jobs join it"


def disk_check(whose: str, folder: str) -> Check:
    """Whether the disk of a folder has room. A folder that is not there yet is made on the disk of the next above."""
    path = Path(folder).expanduser()
    there = next(each for each in (path, *path.parents) if each.exists())
    disk = shutil.disk_usage(there)
    # By what an unprivileged process may still write, as Ray computes it.
    well = disk.free > (1 - RAYS_DISK) * disk.total and os.access(there, os.W_OK)
    text = f"{disk.free / 2**30:.1f} of {disk.total / 2**30:.0f} GiB are free for {path}"
    if not os.access(there, os.W_OK):
        text += "; it cannot be written"
    elif not well:
        text += f"; Ray warns, and may spill nothing, from {RAYS_DISK:.0%} on: free some, or set another folder"
    return f"disk ({whose})", well, text


def memory_check(size: int | None) -> Check:
    """Whether /dev/shm is large enough. ``size``: its bytes; None: this system has none."""
    if size is None:
        return "shared memory", None, "no /dev/shm on this system"
    text = f"/dev/shm has {size >> 20} MiB"
    if size >= SHARED_MEMORY:
        return "shared memory", True, text
    remedy = "Ray's object store, data loaders and NCCL need 1 GiB: start the container with --shm-size=1g"
    return "shared memory", False, f"{text}; {remedy}"


def _serve() -> Check:
    """Only `fluidtune serve` needs Ray Serve."""
    try:
        import ray.serve
    except ImportError as error:
        return "serve", None, f'{error}; for `fluidtune serve` type: pip install "fluidtune[serve]"'
    return "serve", True, f"Ray Serve {ray.__version__}"


def _torch() -> Check:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return "torch", False, f"{error}; type: pip install torch"
    backends = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    return "torch", "gloo" in backends, f"{torch.__version__}, collectives: {', '.join(backends) or 'none'}"


def _forks() -> Check:
    """A fork server is really started. Without one, processes are plain."""
    try:
        from fluidtune.cluster.forks.fork_server import ForkServer
        from fluidtune.cluster.forks.nodes import obstacle
    except ImportError as error:
        return "forks", None, f"not checked ({error})"
    why = obstacle({})
    if why is None:
        began = time.perf_counter()
        server = ForkServer([], os.environ)
        why = server.finish([], {}).why
        server.stop()
    if why is not None:
        return "forks", None, f"each process of a trial is a plain new one, which takes longer: {why}"
    seconds = time.perf_counter() - began
    return "forks", True, f"a fork server was ready after {seconds:.1f} s; processes are forked from it"


def _horovod() -> Check:
    """Only ``backend="horovod"`` needs Horovod."""
    try:
        from fluidtune.elastic.transport.horovod_there import INSTALL_HINT, horovod_missing
    except ImportError as error:
        return "horovod", None, f"not checked ({error})"
    lacking = horovod_missing()
    if lacking is not None:
        return "horovod", None, f'{lacking}; backend="torch" works without it. For backend="horovod" {INSTALL_HINT}'
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
        yield "gpu", None, "no telemetry (pynvml is not installed); type: pip install nvidia-ml-py"
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield "gpu", None, f"none on this machine ({error}); jobs run on cpu devices"
        return
    try:
        yield "gpu", True, f"{pynvml.nvmlDeviceGetCount()} on this machine"
        try:
            import torch
        except ImportError:
            torch = None  # type: ignore[assignment]
        yield from gpu_checks(pynvml, torch)
    finally:
        pynvml.nvmlShutdown()


def _mps() -> Check:
    """Nothing needs MPS: without it, processes that share a GPU take time slices."""
    from salus_share.mps import CONTROL

    program = shutil.which(CONTROL)
    if program is None:
        return "mps", None, f"no {CONTROL} here; with lanes, trials that share a GPU take time slices"
    return "mps", True, program
