"""The resources that Ray says this process has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray._private.worker import global_worker

from fluidtune.device_kinds import KINDS, DeviceKind


def adopt_environment(environment: Mapping[str, str]) -> None:
    """Give this process these environment variables. If they name devices, Ray says from now on that it has them all.

    That is what ``ray.get_gpu_ids()`` and the runtime context's accelerator ids say in this process. Ray names those of
    the process' own placement group only. A trial over several devices has one of each.
    """
    os.environ.update(environment)
    known = ((kind.resource, environment.get(kind.visible or "")) for kind in KINDS.values())
    named = {resource: said.split(",") for resource, said in known if said}
    rays = global_worker.get_accelerator_ids_for_accelerator_resource

    def ids(resource_name: str, resource_regex: str) -> Any:
        own = rays(resource_name, resource_regex)
        if resource_name not in named:
            return own
        # Ray's ids are numbers, but texts where CUDA_VISIBLE_DEVICES was set when the node was started.
        return [int(each) if own and isinstance(own[0], int) else each for each in named[resource_name]]

    if named:
        global_worker.get_accelerator_ids_for_accelerator_resource = ids


def held_ids(kind: DeviceKind) -> list[str]:
    """The ids of this process' devices, as far as Ray numbers those of this kind."""
    return [str(each) for each in ray.get_runtime_context().get_accelerator_ids().get(kind.resource, ())]


def claim_resources(asked: Mapping[str, float]) -> None:
    """Let the runtime context's assigned resources be these in this process, by Ray's names."""
    type(ray.get_runtime_context()).get_assigned_resources = lambda self: dict(asked)


def options_of(resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options of an actor that asks for these resources, by Ray's names, and for nothing else."""
    asked = dict(resources)
    first = {"num_cpus": asked.pop("CPU", 0), "num_gpus": asked.pop("GPU", 0), "memory": asked.pop("memory", None)}
    return {**first, "resources": asked or None}


def none_visible(runtime_env: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a process that has asked Ray for cores alone: it sees no other device.

    Older Rays set them; Ray 2.60 lets such a process see all GPUs of its node. ``runtime_env``: the job's. What it says
    holds.
    """
    said = runtime_env.get("env_vars") or {}
    return {kind.visible: "" for kind in KINDS.values() if kind.visible is not None and kind.visible not in said}
