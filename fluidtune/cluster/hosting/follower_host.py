"""A follower in its worker process: it computes parts of what the leader's modules are called with.

It holds replicas of modules and nothing of the trial's script: it runs no loop, reads no data and writes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ray import cloudpickle

from fluidtune.cluster import emulated
from fluidtune.cluster.hosting.messages import AttachSpec
from fluidtune.cluster.hosting.trial_sessions import emulated_device

if TYPE_CHECKING:
    from fluidtune.cluster.sharing.gpu_probe import GpuProbe
    from fluidtune.cluster.sharing.lanes import Lack


class Follows(Protocol):
    """What follows a leader: a `fluidtune.elastic.divided.follower.Follower`, or an `EmulatedFollower`."""

    def attach(self, address: Any) -> None:
        """Attach this process to the leader there. What it raises says why that cannot be."""

    def run(self) -> None:
        """Serve the leader until it has ended, or has dropped this process."""

    def close(self) -> None:
        """Free what it holds; idempotent."""


class FollowerHost:
    """Hosts one follower, from its attachment to its end. ``gpu``: the process' look at its GPU; None: on cores."""

    def __init__(self, spec: AttachSpec, worker: str, gpu: GpuProbe | None) -> None:
        self._spec, self._gpu = spec, gpu
        self._follows = _of(spec, worker)
        self._attached = False

    def attach(self) -> str | None:
        """Attach this process to the leader. Returns why that cannot be; None: it is attached."""
        try:
            self._follows.attach(self._spec.address)
        except Exception as error:
            return str(error) or repr(error)
        self._attached = True
        return None

    def follow(self) -> str | Lack | None:
        """Serve the leader until that is over. Returns an error of the follower's own; None: there was none.

        A `Lack` says that the GPU has failed.
        """
        if not self._attached:
            return None
        try:
            self._follows.run()
        except Exception as error:
            broken = None if self._gpu is None else self._gpu.broken(error)
            return broken or repr(error)
        return None

    def close(self) -> None:
        """Free what it holds."""
        self._follows.close()


def _of(spec: AttachSpec, worker: str) -> Follows:
    if spec.emulation is not None:
        return emulated.EmulatedFollower(spec.trial, emulated_device(), spec.emulation, spec.secret)
    # Imported here: an emulated follower needs no torch.
    from fluidtune.elastic.divided.follower import Follower

    return Follower(spec.trial, worker, spec.secret, spec.device, pickling=cloudpickle)
