"""What is kept in the cluster's store, so that the process in which Ray restarts an actor has it.

Ray keeps an actor's arguments itself up to 100 KB. Larger ones are objects of the process that has made the actor: if
that has ended, Ray cannot restart the actor any more.
"""

from __future__ import annotations

import ray
from ray._private.worker import global_worker

#: The namespace of the store. It is the head node's, and ends with the cluster.
_NAMESPACE = b"fluidtune"


def can_keep() -> bool:
    """Whether this process reaches the store. A client of Ray Client does not."""
    return getattr(global_worker, "gcs_client", None) is not None


def keep(name: str, state: bytes) -> None:
    """Keep this by this name, in place of what was kept by it before."""
    store = global_worker.gcs_client
    store.internal_kv_put(name.encode(), state, True, _NAMESPACE)


def kept(name: str) -> bytes | None:
    """What is kept by this name; None: nothing."""
    store = global_worker.gcs_client
    return store.internal_kv_get(name.encode(), _NAMESPACE)


def forget(name: str) -> None:
    """Keep nothing by this name any more."""
    store = global_worker.gcs_client
    store.internal_kv_del(name.encode(), False, _NAMESPACE)


def own_name() -> str:
    """A name of this actor, which stays when Ray restarts it."""
    return str(ray.get_runtime_context().get_actor_id())
