"""Start the arbiter, look at it, stop it. For operators, and for jobs that find none."""

from __future__ import annotations

import contextlib
import getpass
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from themis_bridge.errors import ThemisError
from themis_bridge.settings import Settings
from themis_bridge.shell.actor import NAME, NAMESPACE, ArbiterActor, check_unit

#: Ray's own resource of the head node.
HEAD = "node:__internal_head__"


def _books() -> Path:
    """The state file of this Ray cluster's arbiter, on the head node: a cluster is as old as its head."""
    head = next(str(node["NodeID"]) for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"])
    return Path(tempfile.gettempdir()) / f"themis-{getpass.getuser()}" / f"{head[:16]}.json"


def find() -> Any | None:
    """The arbiter of the connected Ray cluster, None if there is none."""
    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None


def start(unit: str | None = None, **settings: Any) -> Any:
    """Start the arbiter on the head node, or find the one that runs; its actor.

    Args:
        unit: "GPU" or "CPU"; None for GPUs if the cluster has any.
        settings: of `Settings`, for a new one.

    Raises:
        ThemisError: a setting that cannot be.
    """
    there = find()
    if there is not None:
        return there
    Settings().changed(settings)
    unit = unit or ("GPU" if ray.cluster_resources().get("GPU") else "CPU")
    check_unit(unit)
    actor = ray.remote(ArbiterActor).options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources={HEAD: 0.0001},
        max_restarts=-1,
        max_concurrency=64,
    )
    arbiter = actor.remote(settings, unit, str(_books()))
    ray.get(arbiter.status.remote())
    return arbiter


def change(unit: str | None, changes: Mapping[str, Any]) -> None:
    """Change settings of the arbiter that runs.

    Raises:
        ThemisError: none runs, it leases another unit, or a setting that cannot be beside those that it has.
    """
    leased = status()["unit"]
    if unit not in (None, leased):
        raise ThemisError(
            f"the arbiter of this Ray cluster leases {leased}s; to lease {unit}s stop it first: fluidtune arbiter stop"
        )
    if changes:
        ray.get(ray.get_actor(NAME, namespace=NAMESPACE).configure.remote(changes))


def stop(patience: float = 20.0) -> bool:
    """End all leases and the arbiter. Returns False if there is none."""
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
    answer: dict[str, Any] = ray.get(arbiter.status.remote(), timeout=30)
    return answer
