"""What Slurm has allocated to a job: its nodes, and the cores, GPUs and memory with which Ray starts on each. Pure.

It is read from the variables that Slurm sets (sbatch(1), srun(1), "OUTPUT ENVIRONMENT VARIABLES"), not from the
machine, whose other cores and GPUs belong to other jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fluidtune.errors import FluidTuneError

#: The part of a node's memory that Ray's object store gets, as Ray has it by default ("Object store memory" in Ray's
#: "Memory Management").
STORE = 0.3
#: The least bytes of an object store (OBJECT_STORE_MINIMUM_MEMORY_BYTES, Ray 2.44 to 2.60).
LEAST_STORE = 75 << 20
#: The most bytes of a Unix socket's path: sun_path in unix(7), without the final zero.
_SOCKET_PATH = 107
#: What Ray puts behind its folder: /session_2026-11-29_06-09-20_123456_4194304/sockets/plasma_store.999
_RAYS_PATH = 69


@dataclass(frozen=True)
class Allocation:
    """A job as one of its processes sees it. ``job``: its id. ``here``: Slurm's name of this node; "": it is none.

    ``hosts``: Slurm's expression for the job's nodes, such as "n[1-3]". ``tasks``: the tasks of this step.
    """

    job: str
    hosts: str
    here: str
    tasks: int


def allocation(variables: Mapping[str, str]) -> Allocation | None:
    """The job that this process belongs to. None: it is in none, or RAY_ADDRESS names a Ray, whatever it is."""
    if "SLURM_JOB_ID" not in variables or "SLURM_JOB_NODELIST" not in variables or "RAY_ADDRESS" in variables:
        return None
    tasks = int(variables.get("SLURM_STEP_NUM_TASKS", 1))
    here = variables.get("SLURMD_NODENAME", "")
    return Allocation(variables["SLURM_JOB_ID"], variables["SLURM_JOB_NODELIST"], here, tasks)


def checked(found: Allocation) -> None:
    """FluidTuneError where a step of several tasks would run the search several times."""
    if found.tasks > 1:
        raise FluidTuneError(
            f"job {found.job}: srun starts this search {found.tasks} times; start it once, by srun --ntasks=1 or "
            "without srun, and it uses all nodes of the job"
        )


def srun_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment for srun in a job, without what the job's own options would have srun do."""
    kept = ("SLURM_CONF", "SLURM_JOB_ID")
    return {name: value for name, value in variables.items() if not name.startswith("SLURM_") or name in kept}


@dataclass(frozen=True)
class Memory:
    """The memory of the job, in MiB: of each node, or of each core. None, and 0: Slurm has said nothing of it."""

    node: int | None = None
    core: int | None = None


def memory(variables: Mapping[str, str]) -> Memory:
    """What Slurm has said of the job's memory."""
    node, core = variables.get("SLURM_MEM_PER_NODE"), variables.get("SLURM_MEM_PER_CPU")
    return Memory(int(node) if node else None, int(core) if core else None)


@dataclass(frozen=True)
class Share:
    """What the job has of one node. ``memory``: bytes; None: Slurm has said nothing of it, and Ray takes all."""

    cores: int
    gpus: int
    memory: int | None

    def options(self) -> list[str]:
        """Options of ``ray start`` for it."""
        said = [f"--num-cpus={self.cores}", f"--num-gpus={self.gpus}"]
        if self.memory is not None:
            store = int(self.memory * STORE)
            said += [f"--object-store-memory={store}", f"--memory={self.memory - store}"]
        return said


def share(variables: Mapping[str, str], affinity: int, of_job: Memory) -> Share:
    """What a process on a node has of it. ``affinity``: the cores that it may run on.

    Raises:
        FluidTuneError: the memory is too little for Ray.
    """
    cores = min(int(variables.get("SLURM_CPUS_ON_NODE") or affinity), affinity)
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = int(variables.get("SLURM_GPUS_ON_NODE") or 0)
    else:
        gpus = sum(bool(entry.strip()) and entry != "NoDevFiles" for entry in visible.split(","))
    mib = of_job.node or (of_job.core or 0) * cores
    if mib and mib << 20 < LEAST_STORE / STORE:
        raise FluidTuneError(f"the job has {mib} MiB of the node's memory, and Ray needs 250: ask for more by --mem")
    return Share(cores, gpus, mib << 20 if mib else None)


def head_options(folder: str, client_port: int) -> list[str]:
    """Options of ``ray start`` for the head: each port is a free one, and its folder is ``folder``.

    ``client_port``: for Ray's client server, which takes no 0. Nobody needs it; if another has taken it, it ends.
    """
    own = ["--port=0", f"--ray-client-server-port={client_port}"]
    return ["--head", *own, f"--temp-dir={folder}", "--include-dashboard=false", *_FREE_PORTS]


def member_options(address: str, own: str | None) -> list[str]:
    """Options of ``ray start`` for another node. ``address``: the head's. ``own``: this node's; None: Ray finds it."""
    return [f"--address={address}", *([] if own is None else [f"--node-ip-address={own}"]), *_FREE_PORTS]


#: Ports that are the same for all Rays of a machine by default, and so collide. 0: the kernel chooses a free one.
_FREE_PORTS = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]


def check_place(place: str, name: str) -> None:
    """FluidTuneError where sockets in the folder ``name`` of ``place`` would have longer paths than Linux allows."""
    most = _SOCKET_PATH - _RAYS_PATH - len(name) - 1
    if len(place) > most:
        raise FluidTuneError(
            f"RAY_TMPDIR={place} is too long for the paths of Ray's sockets; name a folder of at most {most} bytes on "
            "a disk of the node"
        )
