"""Leases as Ray sees them: a detached placement group of one bundle for each, on the GPU's node.

The group's name says whose it is, ``themis/APP/GPU/TOKEN``, so that an arbiter that lost its books can read them off
the cluster. Creating one takes what Ray has free and nothing else; removing it kills what runs in it. Names of groups
belong to a Ray namespace and leases to none, so groups are found in the cluster's table and made from the id there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from themis_bridge.errors import ThemisError
from themis_bridge.locality import Gpu

_PREFIX = "themis"
#: A sliver of a node's own resource ties a group to the node.
_SLIVER = 0.0001
#: (app, GPU, token).
Key = tuple[str, str, int]


def check_app_name(app: str) -> None:
    """Raises ThemisError for a name that cannot be part of a group's."""
    if not app or "/" in app:
        raise ThemisError(f"app name {app!r}: expected a name without '/'")


def cluster_gpus(unit: str) -> tuple[list[Gpu], dict[str, str]]:
    """What can be leased on the living nodes, and the resource that ties a group to each machine.

    ``unit``: "GPU" or "CPU". A machine is a Ray node; its rack is the node's label "rack" if it has one; a GPU's kind
    is the accelerator that Ray found. Nodes are told apart by address: of two on one address only the first counts.
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
    """What exists, or is being made, with its entry in Ray's table."""
    for group in placement_group_table().values():
        parts = str(group["name"]).split("/")
        if len(parts) == 4 and parts[0] == _PREFIX and group["state"] != "REMOVED":
            yield (parts[1], parts[2], int(parts[3])), group


def states() -> dict[Key, str]:
    """Ray's state of every reservation: PENDING, CREATED or RESCHEDULING."""
    return {key: str(group["state"]) for key, group in _groups()}


def created() -> dict[Key, PlacementGroup]:
    """The groups in which something can run."""
    return {key: _handle(group) for key, group in _groups() if group["state"] == "CREATED"}


def reserve(app: str, gpu: Gpu, token: int, bundle: Mapping[str, float], tie: str) -> None:
    """Ask Ray for the group; it is created some milliseconds later, or stays PENDING."""
    name = f"{_PREFIX}/{app}/{gpu.id}/{token}"
    placement_group([{**bundle, tie: _SLIVER}], strategy="PACK", name=name, lifetime="detached")


def remove(*keys: Key) -> None:
    """Ask Ray to remove those groups that exist."""
    for key, group in list(_groups()):
        if key in keys:
            remove_placement_group(_handle(group))


def _handle(group: Mapping[str, Any]) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group["placement_group_id"])))
