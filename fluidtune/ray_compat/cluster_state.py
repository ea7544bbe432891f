"""What the nodes of the Ray cluster have free, and what waits in the cluster for resources.

Ray tells its autoscaler both. Its public functions tell only what all nodes together have free, and nothing of tasks
and actors that wait, nor whether there is an autoscaler that brings nodes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import state
from ray._private.worker import global_worker
from ray.autoscaler.v2.sdk import get_cluster_resource_state

#: The states of a node that runs tasks: running and idle, by Ray's autoscaler.proto (NodeStatus).
_LIVING = (1, 3)
#: Part of the names of the resources of placement groups. What waits for them waits inside a group.
_OF_A_GROUP = "_group_"
#: Where Ray's monitor writes what `ray status` shows: DEBUG_AUTOSCALING_STATUS in Ray's ray_constants.py.
_STATUS_KEY = b"__autoscaling_status"
#: The monitor of a cluster whose nodes were started by hand gives each node another type, with this and the node's
#: id as its name: ``format_readonly_node_type`` in Ray's autoscaler.
_BY_HAND = "node_"
#: Seconds that a new cluster is given to write its first status. Twice the interval of Ray's monitor
#: (AUTOSCALER_UPDATE_INTERVAL_S, 5 s).
_STATUS_WAIT_S = 10.0
#: ``LOCAL_MODE`` in Ray's worker.py. Rays that lack it give this number to processes that run no script.
_LOCAL_MODE = 2


@dataclass(frozen=True)
class ClusterState:
    """The cluster at one moment, about a second old at most.

    ``nodes``: by living node what it has in all, and what of that is free. ``waiting``: the requests of tasks, actors
    and placement groups that wait for resources, each as the resources that it needs on one node.
    """

    nodes: list[tuple[dict[str, float], dict[str, float]]]
    waiting: list[dict[str, float]]


def in_local_mode() -> bool:
    """Whether Ray runs tasks and actors in this very process: `ray.init(local_mode=True)`, which newer Rays lack."""
    return global_worker.mode == _LOCAL_MODE


def cluster_state(but: Collection[str]) -> ClusterState | None:
    """Ask Ray for the state of the cluster; None: this process cannot ask, as it is a client of Ray Client.

    ``but``: the ids of placement groups, as hex digits, whose requests are left out.
    """
    client = getattr(global_worker, "gcs_client", None)
    if client is None:
        return None
    told = get_cluster_resource_state(client)
    nodes = [
        (dict(node.total_resources), dict(node.available_resources))
        for node in told.node_states
        if node.status in _LIVING
    ]
    waiting = []
    for one in told.pending_resource_requests:
        bundle = dict(one.request.resources_bundle)
        if not any(_OF_A_GROUP in name for name in bundle):
            waiting += [bundle] * one.count
    for gang in told.pending_gang_resource_requests:
        # Ray writes "<id of the placement group>:<strategy>|<state>".
        if gang.details.partition(":")[0] not in but:
            waiting += [dict(request.resources_bundle) for request in gang.requests]
    return ClusterState(nodes, waiting)


def draining_nodes() -> set[str]:
    """The ids of nodes that Ray drains: it starts nothing more there, and they end soon. None over Ray Client."""
    return set(state.get_draining_nodes()) if state.gcs_options is not None else set()


def may_get_nodes(worker: Any = global_worker, wait_s: float = _STATUS_WAIT_S) -> bool:
    """Whether an autoscaler may bring nodes; also True where that cannot be told.

    It cannot be told through Ray Client, with the second version of Ray's autoscaler, and in a cluster without Ray's
    monitor. In a cluster that is only some seconds old, this waits ``wait_s`` for the monitor's first report.
    """
    client = getattr(worker, "gcs_client", None)
    deadline = time.monotonic() + wait_s
    while client is not None and time.monotonic() < deadline:
        status = client.internal_kv_get(_STATUS_KEY, None)
        report = json.loads(status).get("autoscaler_report") if status else None
        if report is not None:
            return has_autoscaler(report, ray.nodes())
        time.sleep(0.2)
    return True


def has_autoscaler(report: dict[str, dict[str, int]], nodes: list[dict[str, Any]]) -> bool:
    """Whether Ray's status (its "autoscaler_report") is that of an autoscaler which starts nodes."""
    by_hand = {_BY_HAND + node["NodeID"] for node in nodes}
    return any(name not in by_hand for name in report.get("active_nodes", {}))
