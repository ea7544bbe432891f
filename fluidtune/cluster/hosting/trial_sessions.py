"""Makes the session that a trial's code finds in its leader's process, and puts it away."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from fluidtune.cluster import emulated
from fluidtune.cluster.hosting.messages import LoadSpec
from fluidtune.elastic import LazySession, use, wake_on_first_use
from fluidtune.elastic.transport.membership import LOOPBACK

if TYPE_CHECKING:
    from fluidtune.elastic import ElasticSession, LeaderSession

#: The environment variable with the number of the emulated device that a worker process stands for.
DEVICE_VARIABLE = "FLUIDTUNE_EMULATED_DEVICE"


def leader_session(spec: LoadSpec, worker: str, **resuming: Any) -> LeaderSession:
    """The session of a trial's first worker, in use by this process from now on.

    ``resuming``: arguments of `ElasticSession`. A trial that begins anew gets a `LazySession`.
    """
    if spec.emulation is not None:
        session = emulated.EmulatedSession(spec.trial, emulated_device(), spec.emulation, spec.secret)
        emulated.use_host(session)
        return session
    if resuming["resume"] is None:
        lazy = LazySession(lambda: _elastic_session(spec, worker, leader=True, **resuming))
        wake_on_first_use(lazy)
        return lazy
    return _in_use(_elastic_session(spec, worker, leader=True, **resuming))


def emulated_device() -> int:
    """The number of the emulated device that this process stands for."""
    return int(os.environ[DEVICE_VARIABLE])


def _elastic_session(spec: LoadSpec, worker: str, leader: bool, **more: Any) -> ElasticSession:
    # Imported here: a worker whose trials are not elastic needs no torch.
    from fluidtune.elastic import ElasticSession
    from fluidtune.elastic.transport import backend_class

    host = LOOPBACK if spec.one_node else ray.util.get_node_ip_address()
    backend = backend_class(spec.backend)(host=host, device=spec.device, secret=spec.secret)
    more |= {"device": spec.device, "pickling": cloudpickle}
    return ElasticSession(trial=spec.trial, worker=worker, leader=leader, backend=backend, **more)


def _in_use(session: ElasticSession) -> ElasticSession:
    use(session)
    return session


def storage_of(spec: LoadSpec) -> Any | None:
    """Tune's storage, where the trial's commits go; None: the trial makes no commits."""
    return None if spec.emulation is not None else spec.kwargs.get("storage")


def drop_session(emulating: bool) -> None:
    if emulating:
        emulated.use_host(None)
        return
    wake_on_first_use(None)
    use(None)
