"""What an actor keeps in its cluster's store, so that the process in which Ray restarts it has it again."""

from __future__ import annotations

import ray
from ray._private.worker import global_worker

#: The namespace of the store. It is the head node's, and ends with the cluster.
_NAMESPACE = b"fluidtune"


def keep(state: bytes) -> None:
    """Keep this for this actor, in place of what it has kept before."""
    store = global_worker.gcs_client
    store.internal_kv_put(_key(), state, True, _NAMESPACE)


def kept() -> bytes | None:
    """What this actor has kept; None: nothing."""
    store = global_worker.gcs_client
    return store.internal_kv_get(_key(), _NAMESPACE)


def forget() -> None:
    """Keep nothing any more."""
    store = global_worker.gcs_client
    store.internal_kv_del(_key(), False, _NAMESPACE)


def _key() -> bytes:
    """Of this actor. Its id stays when Ray restarts it."""
    return f"kept/{ray.get_runtime_context().get_actor_id()}".encode()
