"""Reservations: each lease is a detached placement group of one bundle on the GPU's node.

The group is named ``themis/APP/GPU/TOKEN``, so that an arbiter that lost its books can read the leases off the cluster.
A group is created only from free resources; removing it kills what runs in it. Groups are addressed by id, because Ray
finds a group by its name only in the namespace of whoever made it. Ray keeps removed groups in its table for ever, so
that reading the whole table takes ever longer: only `found` does, which the arbiter calls when it starts and stops.
"""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from themis_bridge.errors import ThemisError
from themis_bridge.locality import Gpu

#: (app, GPU, token).
Key = tuple[str, str, int]

_PREFIX = "themis"
#: How much of a node's own resource an actor or a group asks for, to be placed on that node. Source: Ray's
#: MIN_RESOURCE_GRANULARITY, the least that can be asked for.
SLIVER = 0.0001
#: The resource that Ray gives the head node, and only it.
HEAD = "node:__internal_head__"
#: Ray's states of a group in which something can run, and of one that is gone for good.
CREATED, REMOVED = "CREATED", "REMOVED"


def check_app_name(app: str) -> None:
    """Raise ThemisError for a name that cannot be part of a group's name."""
    if not app or "/" in app:
        raise ThemisError(f"app name {app!r}: expected a name without '/'")


def cluster_gpus(unit: str) -> tuple[list[Gpu], dict[str, str], list[str]]:
    """The GPUs of all nodes that are alive, by machine the resource that ties a group to it, and what is left out.

    A machine is a Ray node; its rack is the node's label "rack", if it has one; a GPU's kind is the accelerator type
    that Ray found. Nodes are distinguished by address: of two nodes at one address only the first that has GPUs counts,
    and a line for the operator names the other.

    ``unit``: "GPU" or "CPU"; for "CPU", each core is a `Gpu`.
    """
    gpus: list[Gpu] = []
    ties: dict[str, str] = {}
    left_out: list[str] = []
    for node in sorted(ray.nodes(), key=lambda node: str(node["NodeID"])):
        resources: Mapping[str, float] = node["Resources"]
        tie = f"node:{node['NodeManagerAddress']}"
        machine, there = str(node["NodeID"])[:12], int(resources.get(unit, 0))
        if not node["Alive"] or tie not in resources or not there:
            continue
        if tie in ties.values():
            left_out.append(f"{there} {unit}s of node {machine} are not leased: another has its address, {tie[5:]}")
            continue
        ties[machine] = tie
        kinds = [name.split(":", 1)[1] for name in resources if name.startswith("accelerator_type:")]
        kind = kinds[0] if kinds and unit == "GPU" else unit
        rack = (node.get("Labels") or {}).get("rack", "rack")
        gpus += [Gpu(f"{machine}-{i}", machine, rack, kind=kind) for i in range(there)]
    return gpus, ties, left_out


def found() -> tuple[dict[Key, tuple[str, PlacementGroup]], int]:
    """Reservation -> Ray's state of it and its group, for all that are not removed; and the largest token ever used.

    It reads the whole table, which has those that are removed, too.
    """
    there, newest = {}, 0
    for group in placement_group_table().values():
        key = _key(str(group["name"]))
        if key is not None:
            newest = max(newest, key[2])
            if group["state"] != REMOVED:
                there[key] = str(group["state"]), by_id(str(group["placement_group_id"]))
    return there, newest


def reserve(key: Key, bundle: Mapping[str, float], tie: str) -> PlacementGroup:
    """Ask Ray for a group. It is created some milliseconds later, or stays PENDING while resources are missing.

    ``bundle``: Ray resource -> amount. ``tie``: the resource that ties the group to the GPU's node.
    """
    return placement_group([{**bundle, tie: SLIVER}], strategy="PACK", name=_name(key), lifetime="detached")


def find(key: Key) -> PlacementGroup | None:
    """The group that this process has asked for, if a call that raised an exception has made it all the same."""
    try:
        return get_placement_group(_name(key))
    except ValueError:
        return None


def state(group: PlacementGroup) -> str:
    """Ray's state of one group: `CREATED`, `REMOVED`, PENDING or RESCHEDULING; takes the same time with any number."""
    return str(placement_group_table(group).get("state", REMOVED))


def remove(group: PlacementGroup) -> None:
    """Ask Ray to remove a group; one that does not exist is ignored."""
    remove_placement_group(group)


def sign_of_life() -> PlacementGroup:
    """A group that lives as long as the process that calls this: Ray removes it then, without the process's help.

    For a driver that is certain within a moment of its death, also after SIGKILL, and so it is for a detached actor. A
    group of an actor that is not detached, or of a task, lives as long as the driver of that.
    """
    return placement_group([{HEAD: SLIVER}])


def is_gone(id: str) -> bool:
    """Whether Ray has removed the group of that id, or has never made one."""
    return state(by_id(id)) == REMOVED


def id_of(group: PlacementGroup) -> str:
    """The group's id in hexadecimal digits."""
    return str(group.id.hex())


def by_id(text: str) -> PlacementGroup:
    """The group of that id, as `id_of` gives it."""
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(text)))


def _name(key: Key) -> str:
    app, gpu, token = key
    return f"{_PREFIX}/{app}/{gpu}/{token}"


def _key(name: str) -> Key | None:
    """The reservation of a group of that name; None if no arbiter gives a group such a name."""
    try:
        _, app, gpu, token = name.split("/")
        key = app, gpu, int(token)
    except ValueError:
        return None
    return key if app and gpu and key[2] > 0 and _name(key) == name else None
