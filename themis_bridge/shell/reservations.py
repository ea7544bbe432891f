"""Leases as Ray sees them: a detached placement group of one bundle for each, on the GPU's node.

The group's name says whose it is, ``themis/APP/GPU/TOKEN``, so that an arbiter that lost its books can read them off the
cluster. Creating one takes what Ray has free and nothing else; removing it kills what runs in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util import get_placement_group
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from themis_bridge.errors import ThemisError
from themis_bridge.locality import Gpu

_PREFIX = "themis"
#: A sliver of a node's own resource ties a group to the node.
_SLIVER = 0.0001


def group_name(app: str, gpu: str, token: int) -> str:
    return f"{_PREFIX}/{app}/{gpu}/{token}"


def check_app_name(app: str) -> None:
    """Raises ThemisError for a name that cannot be part of a group's."""
    if not app or "/" in app:
        raise ThemisError(f"app name {app!r}: expected a name without '/'")


def cluster_gpus(unit: str) -> tuple[list[Gpu], dict[str, str]]:
    """What can be leased on the living nodes, and the resource that ties a group to each machine.

    ``unit``: "GPU" or "CPU". A machine is a Ray node; its rack is the node's label "rack" if it has one; a GPU's kind is
    the accelerator that Ray found. Nodes are told apart by address: of two on one address only the first counts.
    """
    gpus, ties = [], {}
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


def found() -> dict[str, tuple[str, int]]:
    """GPU -> (app, token) of all reservations that exist."""
    there = {}
    for group in placement_group_table().values():
        parts = str(group["name"]).split("/")
        if len(parts) == 4 and parts[0] == _PREFIX and group["state"] != "REMOVED":
            there[parts[2]] = (parts[1], int(parts[3]))
    return there


def state(app: str, gpu: str, token: int) -> str:
    """Ray's state of a reservation: PENDING, CREATED, RESCHEDULING or REMOVED."""
    name = group_name(app, gpu, token)
    for group in placement_group_table().values():
        if group["name"] == name and group["state"] != "REMOVED":
            return str(group["state"])
    return "REMOVED"


def reserve(app: str, gpu: Gpu, token: int, bundle: Mapping[str, float], tie: str) -> Any:
    """Ask Ray for the group; it is created some milliseconds later, or stays PENDING."""
    return placement_group(
        [{**bundle, tie: _SLIVER}], strategy="PACK", name=group_name(app, gpu.id, token), lifetime="detached"
    )


def remove(app: str, gpu: str, token: int) -> None:
    """Ask Ray to remove the group, if it exists."""
    try:
        group = get_placement_group(group_name(app, gpu, token))
    except ValueError:
        return
    remove_placement_group(group)
