"""Tensors between a leader and its followers by Horovod's collectives (``backend="horovod"``).

A process has one Horovod, so all workers of a trial start it anew when one has come or gone: the leader says where they
meet. A transfer is a broadcast in the process set of the leader and one follower. When one worker dies, Horovod ends
the transfers of all; the leader goes on with none of them, and its trial grows again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

#: Seconds until all workers must have met: Horovod's default.
_MEET_S = 30
#: What Horovod's broadcast carries: horovod/torch/mpi_ops.py, without bfloat16 and complex numbers.
_TYPES = {
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
}


@dataclass(frozen=True)
class Place:
    """A worker's place in a group of ``world``, which meets at this address."""

    rank: int
    world: int
    host: str
    port: int


class Meeting:
    """The leader's: where a group meets. Each group has one of its own."""

    def __init__(self) -> None:
        from horovod.runner.http.http_server import RendezvousServer

        self._server = RendezvousServer(0)
        self.port = int(self._server.start())
        self._server.init([])

    def close(self) -> None:
        self._server.stop()


def start(place: Place) -> dict[int, Any]:
    """Start this process' Horovod anew in a group. All its workers call it. By follower's rank, the set of two.

    Raises:
        ConnectionResetError: they have not met.
    """
    import horovod.torch as hvd

    stop()
    settings = {
        "RANK": place.rank,
        "SIZE": place.world,
        "LOCAL_RANK": 0,
        "LOCAL_SIZE": 1,
        "CROSS_RANK": place.rank,
        "CROSS_SIZE": place.world,
        "HOSTNAME": f"w{place.rank}",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": place.host,
        "GLOO_RENDEZVOUS_PORT": place.port,
        "GLOO_TIMEOUT_SECONDS": _MEET_S,
        "STALL_CHECK_DISABLE": 1,  # a follower waits as long as its leader does something else
        "LOG_LEVEL": "fatal",
    }
    if place.host == "127.0.0.1":
        settings["GLOO_IFACE"] = "lo"
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in settings.items()})
    sets = {rank: hvd.ProcessSet([0, rank]) for rank in range(1, place.world)}
    try:
        # Of two workers the set of both is the world, which Horovod does not make twice.
        hvd.init(process_sets=list(sets.values()) if place.world > 2 else None)
    except Exception as error:
        stop()
        raise ConnectionResetError(f"Horovod's workers have not met: {error}") from error
    return sets if place.world > 2 else {1: hvd.global_process_set}


def stop() -> None:
    """End this process' Horovod, if it runs."""
    import horovod.torch as hvd

    with suppress(ValueError, RuntimeError):
        hvd.shutdown()


class HorovodPair:
    """One end of a leader's connection with a follower. ``rank``: this end's; ``other``: that of the other end."""

    def __init__(self, rank: int, other: int, process_set: Any) -> None:
        self._rank, self._other, self._set = rank, other, process_set

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor goes by Horovod."""
        return tensor.dtype in _TYPES and tensor.numel() > 0

    def send(self, tensors: Sequence[torch.Tensor], gone: Callable[[], bool]) -> None:
        """Raises ConnectionResetError if a worker of the group is gone."""
        for tensor in tensors:
            self._broadcast(tensor, self._rank)

    def receive(self, tensors: Sequence[torch.Tensor], gone: Callable[[], bool]) -> None:
        """Fill these tensors. Raises as `send`."""
        for tensor in tensors:
            self._broadcast(tensor, self._other)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        import horovod.torch as hvd
        from horovod.common.exceptions import HorovodInternalError

        flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))
        # Horovod keeps something of each name, so there are as many as kinds of tensors.
        name = f"fluidtune.{max(self._rank, self._other)}.{root}.{tensor.dtype}.{tensor.numel()}"
        try:
            hvd.broadcast_(flat, root, name=name, process_set=self._set)
        except (HorovodInternalError, ValueError, RuntimeError) as error:
            raise ConnectionResetError(f"a worker is gone: {error}") from error

    def close(self) -> None:
        """Horovod is the process', and stays."""
