"""Makes the session that a trial's code finds in its leader's process, and puts it away."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ray import cloudpickle

from fluidtune.cluster import emulated
from fluidtune.cluster.hosting.messages import LoadSpec
from fluidtune.elastic import LazySession, use, wake_on_first_use

if TYPE_CHECKING:
    from fluidtune.elastic import ElasticSession, LeaderSession

#: The environment variable with the number of the emulated device that a worker process stands for.
DEVICE_VARIABLE = "FLUIDTUNE_EMULATED_DEVICE"


def leader_session(spec: LoadSpec, **resuming: Any) -> LeaderSession:
    """The session of a trial's first worker, in use by this process from now on.

    ``resuming``: arguments of `ElasticSession`. A trial that begins anew gets a `LazySession`.
    """
    if spec.emulation is not None:
        host = emulated.EmulatedSession(spec.trial, emulated_device(), spec.emulation, spec.secret)
        emulated.use_host(host)
        return host
    if resuming["resume"] is None:
        lazy = LazySession(lambda: _elastic_session(spec, **resuming))
        wake_on_first_use(lazy)
        return lazy
    session = _elastic_session(spec, **resuming)
    use(session)
    return session


def emulated_device() -> int:
    """The number of the emulated device that this process stands for."""
    return int(os.environ[DEVICE_VARIABLE])


def _elastic_session(spec: LoadSpec, **more: Any) -> ElasticSession:
    # Imported here: a worker whose trials are not elastic needs no torch.
    from fluidtune.elastic import ElasticSession

    return ElasticSession(trial=spec.trial, device=spec.device, pickling=cloudpickle, **more)


def storage_of(spec: LoadSpec) -> Any | None:
    """Tune's storage, where the trial's commits go; None: the trial makes no commits."""
    return None if spec.emulation is not None else spec.kwargs.get("storage")


def drop_session(emulating: bool) -> None:
    if emulating:
        emulated.use_host(None)
        return
    wake_on_first_use(None)
    use(None)
