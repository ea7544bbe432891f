"""Reservations: each lease is a detached placement group of one bundle on the GPU's node.

The group is named ``themis/APP/GPU/TOKEN``, so that an arbiter that lost its books can read the leases off the cluster.
A group is created only from free resources; removing it kills what runs in it. Ray finds a group by name only inside a
namespace, and leases belong to none: therefore groups are looked up in the table of all groups, and addressed by id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from themis_bridge.errors import ThemisError
from themis_bridge.locality import Gpu

_PREFIX = "themis"
#: How much of a node's own resource an actor or a group asks for, to be placed on that node. Source: Ray's
#: MIN_RESOURCE_GRANULARITY, the least that can be asked for.
SLIVER = 0.0001
#: (app, GPU, token).
Key = tuple[str, str, int]


def check_app_name(app: str) -> None:
    """Raise ThemisError for a name that cannot be part of a group's name."""
    if not app or "/" in app:
        raise ThemisError(f"app name {app!r}: expected a name without '/'")


def cluster_gpus(unit: str) -> tuple[list[Gpu], dict[str, str]]:
    """The GPUs of all nodes that are alive, and by machine the resource that ties a group to it.

    A machine is a Ray node; its rack is the node's label "rack", if it has one; a GPU's kind is the accelerator type
    that Ray found. Nodes are distinguished by address: of two nodes at one address only the first counts.

    ``unit``: "GPU" or "CPU"; for "CPU", each core is a `Gpu`.
    """
    gpus: list[Gpu] = []
    ties: dict[str, str] = {}
    for node in sorted(ray.nodes(), key=lambda node: str(node["NodeID"])):
        resources: Mapping[str, float] = node["Resources"]
        tie = f"node:{node['NodeManagerAddress']}"
        if not node["Alive"] or tie not in resources or tie in ties.values():
            continue
        machine = str(node["NodeID"])[:12]
        ties[machine] = tie
        kinds = [name.split(":", 1)[1] for name in resources if name.startswith("accelerator_type:")]
        kind = kinds[0] if kinds and unit == "GPU" else unit
        rack = (node.get("Labels") or {}).get("rack", "rack")
        gpus += [Gpu(f"{machine}-{i}", machine, rack, kind=kind) for i in range(int(resources.get(unit, 0)))]
    return gpus, ties


def _groups() -> Iterator[tuple[Key, Mapping[str, Any]]]:
    """The groups of leases that exist or are being made, with their entries in Ray's table."""
    for group in placement_group_table().values():
        parts = str(group["name"]).split("/")
        if len(parts) == 4 and parts[0] == _PREFIX and group["state"] != "REMOVED":
            yield (parts[1], parts[2], int(parts[3])), group


def states() -> dict[Key, str]:
    """Reservation -> Ray's state of it: PENDING, CREATED or RESCHEDULING."""
    return {key: str(group["state"]) for key, group in _groups()}


def created() -> dict[Key, PlacementGroup]:
    """Reservation -> its group, for those in which something can run now."""
    return {key: _handle(group) for key, group in _groups() if group["state"] == "CREATED"}


def reserve(app: str, gpu: Gpu, token: int, bundle: Mapping[str, float], tie: str) -> None:
    """Ask Ray for a group. It is created some milliseconds later, or stays PENDING while resources are missing.

    ``bundle``: Ray resource -> amount. ``tie``: the resource that ties the group to the GPU's node.
    """
    name = f"{_PREFIX}/{app}/{gpu.id}/{token}"
    placement_group([{**bundle, tie: SLIVER}], strategy="PACK", name=name, lifetime="detached")


def remove(*keys: Key) -> None:
    """Ask Ray to remove these groups; those that do not exist are ignored."""
    for key, group in list(_groups()):
        if key in keys:
            remove_placement_group(_handle(group))


def _handle(group: Mapping[str, Any]) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group["placement_group_id"])))
