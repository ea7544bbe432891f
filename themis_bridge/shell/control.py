"""Starts, watches, changes and stops the arbiter: for operators, and for jobs that find none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import ray

from themis_bridge.errors import ThemisError
from themis_bridge.settings import Settings
from themis_bridge.shell import reservations
from themis_bridge.shell.actor import NAME, NAMESPACE, ArbiterActor

#: Seconds for a call of the arbiter until it counts as failed.
STATUS_S = 30.0

#: Calls that the actor answers at a time. They have one lock, so that more threads would only keep memory.
CALLS = 4
#: glibc's malloc has one arena, in place of eight a core. Ray reads each message through half a megabyte, and each
#: arena kept what its threads once had of it: that was the growth of an idle arbiter (docs/arbiter.md, Memory).
ALLOCATION = {"MALLOC_ARENA_MAX": "1"}


def find() -> Any | None:
    """The arbiter of the connected Ray cluster, None if there is none."""
    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None


def start(unit: str | None = None, **settings: Any) -> Any:
    """Return the actor of the arbiter that runs, or start one on the head node.

    Args:
        unit: what a new arbiter leases, "GPU" or "CPU"; None for GPUs if the cluster has any, else CPUs.
        settings: fields of `Settings` for a new arbiter.

    Raises:
        ThemisError: ``unit`` is another word, or a setting is not allowed.
    """
    if unit not in (None, "GPU", "CPU"):
        raise ThemisError(f"unit={unit!r}: an arbiter leases 'GPU' or 'CPU'; None chooses by the cluster")
    there = find()
    if there is not None:
        return there
    Settings().changed(settings)
    unit = unit or ("GPU" if ray.cluster_resources().get("GPU") else "CPU")
    actor = ray.remote(ArbiterActor).options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources={reservations.HEAD: reservations.SLIVER},
        max_restarts=-1,
        max_concurrency=CALLS,
        runtime_env={"env_vars": ALLOCATION},
    )
    head = next(node for node in ray.nodes() if node["Alive"] and reservations.HEAD in node["Resources"])
    arbiter = actor.remote(settings, unit, str(head["NodeID"]))
    ray.get(arbiter.status.remote())
    return arbiter


def change(unit: str | None, changes: Mapping[str, Any]) -> None:
    """Change settings of the arbiter that runs.

    Raises:
        ThemisError: no arbiter runs, it leases another unit, or a setting is not allowed together with the others.
    """
    leased = status()["unit"]
    if unit not in (None, leased):
        raise ThemisError(
            f"the arbiter of this Ray cluster leases {leased}s; to lease {unit}s stop it first: fluidtune arbiter stop"
        )
    if changes:
        arbiter = ray.get_actor(NAME, namespace=NAMESPACE)  # Ray 2.44's methods do not keep their handle
        ray.get(arbiter.configure.remote(changes))


def stop(patience: float = 20.0) -> bool:
    """End all leases and the arbiter. Returns False if no arbiter runs. ``patience``: seconds for each of the two."""
    arbiter = find()
    if arbiter is None:
        return False
    with contextlib.suppress(ray.exceptions.RayActorError):
        ray.get(arbiter.close.remote(), timeout=patience)
    ray.kill(arbiter, no_restart=True)
    deadline = time.monotonic() + patience
    while find() is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    return True


def status() -> dict[str, Any]:
    """See `ArbiterActor.status`. Raises ThemisError if no arbiter runs."""
    arbiter = find()
    if arbiter is None:
        raise ThemisError("no arbiter runs on this Ray cluster; start one with: fluidtune arbiter start")
    answer: dict[str, Any] = ray.get(arbiter.status.remote(), timeout=STATUS_S)
    return answer
