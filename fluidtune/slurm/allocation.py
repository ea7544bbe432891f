"""What Slurm has allocated to a job: its nodes, and the cores, GPUs and memory with which Ray starts on each. Pure.

It is read from the variables that Slurm sets (sbatch(1), srun(1), "OUTPUT ENVIRONMENT VARIABLES"), not from the
machine, whose other cores and GPUs belong to other jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: The part of a node's memory for Ray's object store, as by default ("Object store memory" in Ray's documentation).
STORE = 0.3


@dataclass(frozen=True)
class Allocation:
    """A job as one of its processes sees it. ``job``: its id. ``here``: Slurm's name of this node; "": it is none.

    ``name``: what scontrol and scancel call it. In an array the id of one job is that of the array, and means all jobs.
    ``hosts``: Slurm's expression for the job's nodes, such as "n[1-3]". ``tasks``: the tasks of this step.
    ``memory``: MiB of each node, and of each core; 0: Slurm has said nothing of it.
    """

    job: str
    name: str
    hosts: str
    here: str
    tasks: int
    memory: tuple[int, int]


def allocation(variables: Mapping[str, str]) -> Allocation:
    """The job of a process with these variables, which have SLURM_JOB_NODELIST."""
    tasks, here = int(variables.get("SLURM_STEP_NUM_TASKS", 1)), variables.get("SLURMD_NODENAME", "")
    job = name = variables["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in variables:
        name = f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    memory = int(variables.get("SLURM_MEM_PER_NODE") or 0), int(variables.get("SLURM_MEM_PER_CPU") or 0)
    return Allocation(job, name, variables["SLURM_JOB_NODELIST"], here, tasks, memory)


def srun_variables(variables: Mapping[str, str], job: str) -> dict[str, str]:
    """The environment for srun in this job, without what the own job's options would have srun do."""
    kept = {"SLURM_CONF"} | ({"SLURM_JOB_ID", "SLURM_JOB_NODELIST"} if variables["SLURM_JOB_ID"] == job else set())
    return {name: value for name, value in variables.items() if not name.startswith("SLURM_") or name in kept}


def share_options(variables: Mapping[str, str], affinity: int, of_job: Sequence[int]) -> list[str]:
    """Options of ``ray start`` for what a process on a node has of it.

    ``affinity``: the cores that the process may run on. ``of_job``: `Allocation.memory`; without it Ray takes all.
    """
    cores = min(int(variables.get("SLURM_CPUS_ON_NODE") or affinity), affinity)
    visible, gpus = variables.get("CUDA_VISIBLE_DEVICES"), int(variables.get("SLURM_GPUS_ON_NODE") or 0)
    if visible is not None:
        gpus = sum(entry.strip() not in ("", "NoDevFiles") for entry in visible.split(","))
    memory = (of_job[0] or of_job[1] * cores) << 20
    store = int(memory * STORE)
    sizes = [f"--object-store-memory={store}", f"--memory={memory - store}"] if memory else []
    return [f"--num-cpus={cores}", f"--num-gpus={gpus}", *sizes]
