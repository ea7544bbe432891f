"""Ends what an actor has created in Ray, and what that has created in turn: actors and placement groups.

Ray ends actors and tasks when the process ends that has created them, some time later. A placement group that an actor
has created stays until the job ends (ray#54305). Ray's tables name the creator of each. What was created with
``lifetime="detached"`` stays, and what that has created. So does a placement group that a task has created: the
tables name no creator of it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import ray
from ray._private.state import state
from ray._private.worker import global_worker
from ray._raylet import GlobalStateAccessor
from ray.core.generated.core_worker_pb2 import ActorHandle
from ray.core.generated.gcs_pb2 import ActorTableData, PlacementGroupTableData
from ray.util.placement_group import PlacementGroup, remove_placement_group

logger = logging.getLogger(__name__)

#: Detached actors that serve only the one that has created them. Ray Train's is told by Ray's dashboard that its
#: creator has ended. Where there is no dashboard it stays for ever.
_HELPERS = {"PlacementGroupCleaner"}
#: Seconds between two looks. An actor that is told to end can create something until its process ends.
_PAUSE_S = 0.1
#: Seconds after which a warning names what is still there.
_PATIENCE_S = 5.0


def end_made_by(actor: Any = None) -> None:
    """End what the actor has created, and wait until it is gone. ``actor``: its handle, dead or alive; None: this one.

    A client of Ray Client cannot look at Ray's tables; there this does nothing.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        actors, groups = _made_by(actor)
        if not actors and not groups:
            return
        if time.monotonic() > deadline:
            names = sorted(each.class_name for each in actors)
            logger.warning("FluidTune: what a trial has created in Ray does not end: %s, %d groups", names, len(groups))
            return
        for each in actors:
            _kill(each)
        for group in groups:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))
        time.sleep(_PAUSE_S)


def waits_for(actor: Any) -> list[dict[str, float]]:
    """The bundles of placement groups that the actor has created, or what it has created, and that have no room."""
    waiting = [group for group in _made_by(actor)[1] if group.state == PlacementGroupTableData.PENDING]
    return [dict(bundle.unit_resources) for group in waiting for bundle in group.bundles]


def _made_by(actor: Any) -> tuple[list[Any], list[Any]]:
    """The living actors and the placement groups that the actor has created, or what it has created."""
    if state.gcs_options is None:
        return [], []
    tables = GlobalStateAccessor(state.gcs_options)
    tables.connect()
    context = ray.get_runtime_context()
    creator = bytes.fromhex(context.get_actor_id() or "") if actor is None else actor._actor_id.binary()
    by_owner: dict[bytes, list[Any]] = {}
    process = b""
    for row in tables.get_actor_table(ray.JobID(bytes.fromhex(context.get_job_id())), None):
        other = ActorTableData.FromString(row)
        by_owner.setdefault(other.owner_address.worker_id, []).append(other)
        if other.actor_id == creator:
            process = other.address.worker_id
    creators, living, processes = {creator}, [], [process]
    while processes:
        for other in by_owner.pop(processes.pop(), ()):
            if not other.is_detached or other.class_name in _HELPERS:
                creators.add(other.actor_id)
                processes.append(other.address.worker_id)
                if other.state != ActorTableData.DEAD:
                    living.append(other)
    groups = map(PlacementGroupTableData.FromString, tables.get_placement_group_table())
    return living, [
        group
        for group in groups
        if group.creator_actor_id in creators
        and not group.is_detached
        and group.state != PlacementGroupTableData.REMOVED
    ]


def _kill(actor: Any) -> None:
    """Kill an actor whose handle another process has. Ray kills only those whose handle this process knows."""
    handle = ActorHandle(
        actor_id=actor.actor_id, owner_address=actor.owner_address, creation_job_id=actor.job_id
    ).SerializeToString()
    with contextlib.suppress(AssertionError):  # it is known from now on, and has no class from which to make an object
        global_worker.core_worker.deserialize_and_register_actor_handle(handle, ray.ObjectRef.nil(), True)
    with contextlib.suppress(ray.exceptions.RayError, ValueError):  # the next look sees whether it lives
        global_worker.core_worker.kill_actor(ray.ActorID(actor.actor_id), True)
