"""The resources that Ray says this process has."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._private.worker import global_worker

#: The environment variable by which CUDA knows the GPUs of a process.
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def adopt_environment(environment: Mapping[str, str]) -> None:
    """Give this process these environment variables. If they name GPUs, Ray says from now on that it has them all."""
    os.environ.update(environment)
    if environment.get(VISIBLE_GPUS):
        _claim_gpus(environment[VISIBLE_GPUS].split(","))


def claim_resources(asked: Mapping[str, float]) -> None:
    """Let the runtime context's assigned resources be these in this process, by Ray's names."""
    type(ray.get_runtime_context()).get_assigned_resources = lambda self: dict(asked)


def without_gpus(runtime_env: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a process that has asked Ray for no GPU: it sees none.

    Older Rays set them; Ray 2.60 lets such a process see all GPUs of its node. ``runtime_env``: the job's. What it says
    holds.
    """
    return {} if VISIBLE_GPUS in (runtime_env.get("env_vars") or {}) else {VISIBLE_GPUS: ""}


def _claim_gpus(gpus: Sequence[str]) -> None:
    """Let ``ray.get_gpu_ids()`` and the runtime context's accelerator ids name these GPUs in this process.

    Ray names those of the process' own placement group only. A trial over several devices has one of each.
    """
    rays = global_worker.get_accelerator_ids_for_accelerator_resource

    def ids(resource_name: str, resource_regex: str) -> Any:
        own = rays(resource_name, resource_regex)
        if resource_name != "GPU":
            return own
        # Ray's ids are numbers, but texts where CUDA_VISIBLE_DEVICES was set when the node was started.
        return [int(gpu) if own and isinstance(own[0], int) else gpu for gpu in gpus]

    global_worker.get_accelerator_ids_for_accelerator_resource = ids
