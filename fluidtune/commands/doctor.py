"""The checks of `fluidtune doctor`: what FluidTune needs, and what it can use. Each says what it found.

What is absent and not needed is neither well nor missing.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from itertools import combinations
from typing import TYPE_CHECKING, Any

from fluidtune.errors import FluidTuneError
from fluidtune.slurm import allocation

if TYPE_CHECKING:
    from fluidtune.cluster.forks.fork_server import ForkServer

#: The name of what was checked, whether it is well, and what was found or what to type. None: it is not there, and jobs
#: run without it.
Check = tuple[str, bool | None, str]

#: The part of a disk from which on Ray warns, and makes no files for objects that have no room in memory:
#: ``local_fs_capacity_threshold`` in Ray's ray_config_def.h (Ray 2.44 to 2.60).
RAYS_DISK = 0.95
#: Bytes of /dev/shm that NCCL, data loaders and Ray's object store may need. NVIDIA's documentation of NCCL
#: says to start containers with --shm-size=1g, as Docker's 64 MiB are too few.
SHARED_MEMORY = 1 << 30
#: What is said where there is no fork server.
PLAIN = "each process of a trial is a plain new one, which takes longer: {}"
#: How another folder is set.
SETS = {"Ray": "RAY_TMPDIR", "results": "RunConfig(storage_path=...)"}


def checks() -> Iterator[Check]:
    """All checks, in the order of the command's lines."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield "python", (3, 10) <= sys.version_info[:2] <= (3, 13), f"{version} (3.10 to 3.13 are supported)"
    server, shm = _begun(), "/dev/shm"
    yield from looked("ray", _ray)
    yield from looked("slurm", _slurm)
    yield from looked("cluster", _cluster)
    yield from looked("disk", lambda: disk_check("Ray", os.environ.get("RAY_TMPDIR", "/tmp")))
    yield from looked("disk", lambda: disk_check("results", "~/ray_results"))
    yield from looked("memory", lambda: memory_check(shutil.disk_usage(shm).total if os.path.isdir(shm) else None))
    yield from looked("torch", _torch)
    yield from looked("fork server", lambda: _forks(server))
    yield from looked("serve", _serve)
    yield from looked("gpu", _gpus)
    yield from looked("mps", _mps)


def looked(name: str, look: Callable[[], Check | Iterator[Check]]) -> Iterator[Check]:
    """What ``look`` finds. What it raises is a line, too: doctor is asked where something is broken."""
    try:
        found = look()
        yield from [found] if isinstance(found, tuple) else found
    except FluidTuneError as error:
        yield name, False, str(error)
    except ModuleNotFoundError as error:
        yield name, False, f"{error}; type: pip install {error.name}"
    except Exception as error:
        said = (str(error).strip().splitlines() or ["no more is said"])[0]
        yield name, False, f"cannot be checked, as something raises {type(error).__name__}: {said}"


def _ray() -> Check:
    import ray

    from fluidtune.ray_compat.versions import NEWEST_RAY, OLDEST_RAY, check_ray_version

    check_ray_version()
    return "ray", True, f"{ray.__version__} (tested from {OLDEST_RAY} to {NEWEST_RAY})"


def _slurm() -> Check:
    """In a job: what Ray would have of this node. Elsewhere: whether jobs can be submitted."""
    if "SLURM_JOB_NODELIST" not in os.environ:
        there = True if shutil.which("sbatch") else None
        return "slurm", there, f"`fluidtune slurm` submits {'jobs' if there else 'nothing: no sbatch here'}"
    job, cores = allocation.allocation(os.environ), len(os.sched_getaffinity(0))
    has = " ".join(allocation.share_options(os.environ, cores, job.memory))
    here = f"Ray starts with {has} on this node, {job.here}" if job.here else "this is none of its nodes"
    return "slurm", True, f"job {job.job} is on {job.hosts}, which `fluidtune run` uses; {here}"


def _cluster() -> Iterator[Check]:
    """A job joins the cluster that runs here, and begins one of its own where there is none."""
    import ray

    from fluidtune.ray_compat.cluster_address import join

    # What takes long to import is imported while a silent cluster is waited for.
    if not join(meanwhile=lambda: [*looked("torch", _torch), *looked("serve", _serve)]):
        yield "cluster", None, "none to join, so a job begins one of its own"
        return
    try:
        has = ray.cluster_resources()
        nodes = sum(node["Alive"] for node in ray.nodes())
        said = f"{nodes} {'node' if nodes == 1 else 'nodes'}, {has.get('CPU', 0):g} CPUs, {has.get('GPU', 0):g} GPUs"
        yield "cluster", True, f"{said}; jobs join it"
        yield _quick()
    finally:
        ray.shutdown()


def _quick() -> Check:
    """Whether processes of trials start as soon on each node of the cluster as they can."""
    from fluidtune.cluster.forks.quick_nodes import slow_nodes

    slow = slow_nodes()
    if not slow:
        return "quick start", True, "on all nodes: a process of a trial starts without the import of Ray"
    remedy = "start a node by `fluidtune node start` in place of `ray start`, with the same options"
    return "quick start", None, f"not on {', '.join(slow)}: {remedy}"


def disk_check(whose: str, folder: str) -> Check:
    """Whether the disk of a folder has room. A folder that is not there yet is made on the disk of the next above."""
    # (Unlike those of `Path`, these functions raise nothing where there is no home, or one may not look.)
    path = os.path.expanduser(folder)
    there = os.path.abspath(path)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    disk = shutil.disk_usage(there)
    # By what an unprivileged process may still write, as Ray computes it.
    well = disk.free > (1 - RAYS_DISK) * disk.total and os.access(there, os.W_OK)
    text = f"{disk.free / 2**30:.1f} of {disk.total / 2**30:.0f} GiB are free for {path}"
    if not os.access(there, os.W_OK):
        text += f"; it cannot be written: set {SETS[whose]}"
    elif not well:
        text += f"; Ray warns, and may spill nothing, from {RAYS_DISK:.0%} on: free some, or set {SETS[whose]}"
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
    from fluidtune.serving.service import missing

    if missing():
        return "serve", None, f'no {", ".join(missing())}; for `fluidtune serve` type: pip install "fluidtune[serve]"'
    return "serve", True, f"uvicorn {version('uvicorn')}"


def _torch() -> Check:
    import torch
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    found = f"{torch.__version__}, collectives: {', '.join(backends) or 'none'}"
    return "torch", "gloo" in backends, found + ("" if "gloo" in backends else "; type: pip install torch")


def _begun() -> ForkServer | Check:
    """A fork server that imports torch from now on, as one of a job does; or what is to be said where none starts."""
    try:
        from fluidtune.cluster.forks.fork_server import ForkServer
        from fluidtune.cluster.forks.nodes import obstacle

        if why := obstacle({}):
            return "forks", None, PLAIN.format(why)
        server = ForkServer(["torch"] if find_spec("torch") else [], os.environ)
        server.begin()
        return server
    except Exception as error:  # an import of Ray may raise anything
        return "forks", None, f"not checked ({error})"


def _forks(begun: ForkServer | Check) -> Check:
    """Without a fork server, processes are plain."""
    if isinstance(begun, tuple):
        return begun
    state = begun.finish([], {})
    begun.stop()
    if state.why is not None:
        return "forks", None, PLAIN.format(state.why)
    return "forks", True, f"processes are forked from a server that has imported {state.modules} modules"


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
        except (ImportError, OSError):  # OSError: a library of CUDA's is missing
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


def gpu_checks(nvml: Any, torch: Any, environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """All checks of this machine's GPUs, as NVML says. They start no CUDA and change no setting.

    ``nvml``: pynvml, initialised. ``torch``: the module; None: there is none.
    """
    count = nvml.nvmlDeviceGetCount()
    gpus: dict[int, Any] = {}
    for index in range(count):
        try:
            gpus[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            yield f"gpu {index}", False, f"does not answer ({error}); see dmesg for Xid messages, and reset or drain it"
    if not gpus:
        return
    yield _driver(nvml, torch)
    yield _visible(nvml, gpus, environment)
    for index, gpu in gpus.items():
        yield from _state(nvml, index, gpu)
    yield from _kinds(nvml, gpus, environment)
    if len(gpus) > 1:
        yield _peers(nvml, gpus)
        nccl = torch is not None and torch.distributed.is_nccl_available()
        yield "nccl", nccl, "there" if nccl else "not in this torch: a trial cannot have several GPUs"


def _driver(nvml: Any, torch: Any) -> Check:
    """Whether torch was built for CUDA, and for one that the driver can run.

    NVIDIA's CUDA compatibility guide: a driver runs programs of its own major version of CUDA, and of earlier ones.
    """
    number = nvml.nvmlSystemGetCudaDriverVersion_v2()
    major, minor = number // 1000, number % 1000 // 10
    driver = f"driver {nvml.nvmlSystemGetDriverVersion()} for CUDA {major}.{minor}"
    if torch is None:
        return "cuda", False, f"{driver}, and no torch; type: pip install torch"
    built = torch.version.cuda
    if built is None:
        return "cuda", False, f"{driver}, and a torch without CUDA: pip install torch from the index of CUDA {major}"
    well = int(built.split(".")[0]) <= major
    return "cuda", well, f"{driver}, torch for {built}" + ("" if well else f": install a driver for CUDA {built}")


def _visible(nvml: Any, gpus: Mapping[int, Any], environment: Mapping[str, str]) -> Check:
    """Whether CUDA_VISIBLE_DEVICES names GPUs of this machine."""
    said = environment.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return "visible gpus", True, f"all of {len(gpus)}"
    names = [str(nvml.nvmlDeviceGetUUID(gpu)) for gpu in gpus.values()]
    entries = [entry.strip() for entry in said.split(",") if entry.strip()]

    def known(entry: str) -> bool:
        # CUDA's documentation: a UUID may be shortened as long as it is unique; a MIG instance is not in NVML's list.
        return (
            entry.startswith("MIG-")
            or (entry.isdigit() and int(entry) in gpus)
            or (entry.startswith("GPU-") and sum(name.startswith(entry) for name in names) == 1)
        )

    strange = [entry for entry in entries if not known(entry)]
    if strange:
        return "visible gpus", False, f"CUDA_VISIBLE_DEVICES={said}: no GPU here is {strange[0]}, and CUDA stops there"
    return "visible gpus", bool(entries), f"CUDA_VISIBLE_DEVICES={said}: {len(entries)} of {len(gpus)}"


def _state(nvml: Any, index: int, gpu: Any) -> Iterator[Check]:
    """One GPU's compute mode, MIG and memory errors; only what is not as usual."""
    mode = _ask(nvml, nvml.nvmlDeviceGetComputeMode, gpu)
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        yield f"gpu {index}", False, f"compute mode Prohibited: nvidia-smi -i {index} -c DEFAULT"
    elif mode is not None and mode != nvml.NVML_COMPUTEMODE_DEFAULT:
        remedy = f"trials share it under MPS only; without MPS: --max-packing 1, or nvidia-smi -i {index} -c DEFAULT"
        yield f"gpu {index}", False, f"compute mode Exclusive: {remedy}"
    mig = _ask(nvml, nvml.nvmlDeviceGetMigMode, gpu)
    if mig is not None and mig[0] == 1:
        remedy = "start Ray with its instances' UUIDs (nvidia-smi -L) in CUDA_VISIBLE_DEVICES; a trial takes one"
        yield f"gpu {index}", True, f"divided by MIG: {remedy}"
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = _ask(nvml, lambda handle: nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds), gpu)
    if errors:
        remedy = f"processes that meet them die; drain it, then nvidia-smi -i {index} --gpu-reset"
        yield f"gpu {index}", False, f"{errors} uncorrected memory errors since the driver was loaded: {remedy}"


def _kinds(nvml: Any, gpus: Mapping[int, Any], environment: Mapping[str, str]) -> Iterator[Check]:
    """GPUs of several kinds: CUDA's order is then not NVML's, and a trial's speed depends on where it is."""
    names = [str(nvml.nvmlDeviceGetName(gpu)) for gpu in gpus.values()]
    if len(set(names)) > 1:
        ordered = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        found = f"{', '.join(sorted(set(names)))} in one machine: speeds are measured as if all were alike"
        remedy = "" if ordered else "; set CUDA_DEVICE_ORDER=PCI_BUS_ID before Ray starts, so that numbers mean one GPU"
        yield "kinds of gpus", ordered, found + remedy


def _peers(nvml: Any, gpus: Mapping[int, Any]) -> Check:
    """Whether the GPUs can read each other's memory; else NCCL goes through the memory of the machine."""
    apart = [(first, second) for first, second in combinations(gpus, 2) if not _reach(nvml, gpus[first], gpus[second])]
    if not apart:
        return "peer access", True, "each GPU reaches every other one"
    first, second = apart[0]
    found = f"{len(apart)} pairs do not reach each other, as {first} and {second}: NCCL is slower there"
    return "peer access", True, f"{found}; if it hangs, set NCCL_P2P_DISABLE=1"


def _reach(nvml: Any, first: Any, second: Any) -> bool:
    status = _ask(nvml, lambda gpu: nvml.nvmlDeviceGetP2PStatus(gpu, second, nvml.NVML_P2P_CAPS_INDEX_READ), first)
    return status is None or status == nvml.NVML_P2P_STATUS_OK


def _ask(nvml: Any, ask: Callable[[Any], Any], of: Any) -> Any:
    """Ask what not every GPU supports; None if this one does not."""
    try:
        return ask(of)
    except nvml.NVMLError:
        return None
