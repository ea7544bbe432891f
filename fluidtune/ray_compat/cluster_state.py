"""What the nodes of the Ray cluster have free, and what waits in the cluster for resources.

Ray tells its autoscaler both. Its public functions tell only what all nodes together have free, and nothing of tasks
and actors that wait.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ray._private.worker import global_worker
from ray.autoscaler.v2.sdk import get_cluster_resource_state

#: The states of a node that runs tasks: running and idle, by Ray's autoscaler.proto (NodeStatus).
_LIVING = (1, 3)
#: Part of the names of the resources of placement groups. What waits for them waits inside a group.
_OF_A_GROUP = "_group_"
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
    state = get_cluster_resource_state(client)
    nodes = [
        (dict(node.total_resources), dict(node.available_resources))
        for node in state.node_states
        if node.status in _LIVING
    ]
    waiting = []
    for one in state.pending_resource_requests:
        bundle = dict(one.request.resources_bundle)
        if not any(_OF_A_GROUP in name for name in bundle):
            waiting += [bundle] * one.count
    for gang in state.pending_gang_resource_requests:
        # Ray writes "<id of the placement group>:<strategy>|<state>".
        if gang.details.partition(":")[0] not in but:
            waiting += [dict(request.resources_bundle) for request in gang.requests]
    return ClusterState(nodes, waiting)
