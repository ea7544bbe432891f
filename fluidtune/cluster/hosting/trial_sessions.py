"""Makes what a worker hosts of a trial: the session that its code finds in the leader's process, or a follower."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from ray import cloudpickle

from fluidtune.cluster import emulated
from fluidtune.cluster.hosting.messages import AttachSpec, LoadSpec
from fluidtune.device_kinds import KINDS
from fluidtune.elastic import LazySession, use

if TYPE_CHECKING:
    from fluidtune.elastic import ElasticSession, LeaderSession

#: The environment variable with the number of the emulated device that a worker process stands for.
DEVICE_VARIABLE = "FLUIDTUNE_EMULATED_DEVICE"


def leader_session(spec: LoadSpec, **resuming: Any) -> LeaderSession:
    """The session of a trial's first worker, in use by this process from now on.

    ``resuming``: arguments of `ElasticSession`. A trial that begins anew gets a `LazySession`.
    """
    if spec.emulation is not None:
        host = emulated.EmulatedSession(emulated_device(), spec.emulation)
        emulated.use_host(host)
        return host
    begins = resuming["resume"] is None
    session = LazySession(lambda: _elastic_session(spec, **resuming)) if begins else _elastic_session(spec, **resuming)
    use(session)
    return session


class Follows(Protocol):
    """What follows a leader: a `fluidtune.elastic.divided.follower.Follower`, or an `EmulatedFollower`."""

    def attach(self, address: Any) -> None:
        """Attach this process to the leader there. What it raises says why that cannot be."""

    def run(self) -> None:
        """Serve the leader until it has ended, or has dropped this process."""

    def close(self) -> None:
        """Free what it holds; idempotent."""


def follower(spec: AttachSpec, worker: str) -> Follows:
    """A follower of the trial in the worker of this name, which is to be attached."""
    if spec.emulation is not None:
        return emulated.EmulatedFollower(emulated_device(), spec.emulation)
    # Imported here: an emulated follower needs no torch.
    from fluidtune.elastic.divided.follower import Follower

    return Follower(spec.trial, worker, spec.secret, KINDS[spec.device].torch, pickling=cloudpickle)


def emulated_device() -> int:
    """The number of the emulated device that this process stands for."""
    return int(os.environ[DEVICE_VARIABLE])


def _elastic_session(spec: LoadSpec, **more: Any) -> ElasticSession:
    # Imported here: a worker whose trials are not elastic needs no torch.
    from fluidtune.elastic import ElasticSession

    return ElasticSession(trial=spec.trial, device=KINDS[spec.device].torch, pickling=cloudpickle, **more)


def storage_of(spec: LoadSpec) -> Any | None:
    """Tune's storage, where the trial's commits go; None: the trial makes no commits."""
    return None if spec.emulation is not None else spec.kwargs.get("storage")


def drop_session(emulating: bool) -> None:
    if emulating:
        emulated.use_host(None)
        return
    use(None)
