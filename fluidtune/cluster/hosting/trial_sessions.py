"""Makes what a worker hosts of a trial: the session that its code finds in the leader's process, or a follower."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ray import cloudpickle

from fluidtune.cluster import emulated
from fluidtune.cluster.hosting.messages import AttachSpec, LoadSpec
from fluidtune.device_kinds import KINDS
from fluidtune.elastic import LazySession, use

if TYPE_CHECKING:
    from fluidtune.elastic import ElasticSession, LeaderSession
    from fluidtune.elastic.divided.follower import Follower

#: The environment variable with the number of the emulated device that a worker process stands for.
DEVICE_VARIABLE = "FLUIDTUNE_EMULATED_DEVICE"


def leader_session(spec: LoadSpec, **resuming: Any) -> LeaderSession:
    """The session of a trial's first worker, in use by this process from now on.

    ``resuming``: arguments of `ElasticSession`. A trial that begins anew gets a `LazySession`.
    """
    if spec.emulation is not None:
        return emulated.EmulatedSession(emulated_device(), spec.emulation)
    begins = resuming["resume"] is None
    session = LazySession(lambda: _elastic_session(spec, **resuming)) if begins else _elastic_session(spec, **resuming)
    use(session)
    return session


def follower(spec: AttachSpec, worker: str) -> Follower | emulated.EmulatedFollower:
    """A follower of the trial in the worker of this name, which is to be attached."""
    if spec.emulation is not None:
        return emulated.EmulatedFollower(emulated_device(), spec.emulation)
    from fluidtune.elastic.divided.follower import Follower  # here, because an emulated follower needs no torch

    return Follower(spec.trial, worker, spec.secret, KINDS[spec.device].torch, pickling=cloudpickle)


def emulated_device() -> int:
    """The number of the emulated device that this process stands for."""
    return int(os.environ[DEVICE_VARIABLE])


def _elastic_session(spec: LoadSpec, **more: Any) -> ElasticSession:
    from fluidtune.elastic import ElasticSession  # here, because a worker whose trials are not elastic needs no torch

    return ElasticSession(trial=spec.trial, device=KINDS[spec.device].torch, pickling=cloudpickle, **more)
