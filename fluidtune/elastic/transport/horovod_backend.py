"""Horovod as a collective backend: gloo on CPUs, NCCL on GPUs where it was built with that.

A process has one Horovod. Its background threads exchange messages all the time, so a worker's death is noticed within
a collective and outside of one, and a slow iteration is not taken for a death. To Horovod each worker is a host of its
own: Ray shows a worker only its own GPU, which then has number 0, the local rank.
"""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import torch
import torch.distributed as dist

from fluidtune.errors import FluidTuneError

from .base import CollectiveBackend
from .horovod_there import GPU_INSTALL_HINT, require_horovod
from .membership import Address
from .rendezvous import Rendezvous
from .signing import SignedStore
from .torch_backend import interface_of

#: Seconds between two looks whether a member died while a group forms.
_LOOK_S = 0.02


class HorovodBackend(CollectiveBackend):
    """Collectives are Horovod's. FluidTuneError if it is not installed, or not built for the device."""

    def __init__(
        self, host: str = "127.0.0.1", device: str = "cpu", form_timeout: float = 30.0, secret: bytes = b""
    ) -> None:
        require_horovod()
        if device.startswith("cuda"):
            import horovod.torch as hvd

            if not hvd.nccl_built():  # its thread would end at the first tensor, and all would wait for ever
                raise FluidTuneError(
                    f"the installed Horovod was built without NCCL, which GPUs need: {GPU_INSTALL_HINT}"
                )
        super().__init__(host, device, form_timeout, secret)
        self._running = False
        self._alone = False
        self._server: Rendezvous | None = None

    def alone(self) -> None:
        """From now on Horovod runs in a world of one, too, for code that calls Horovod itself (`elastic.hvd`)."""
        self._alone = True
        if not self._running:
            self._start(0, 1, "", 0)

    def form(self, address: Address, generation: float, rank: int, world: int) -> None:
        self._stop()  # a world of one, if there is one
        super().form(address, generation, rank, world)
        if self.world == 1 and self._alone:
            self._start(0, 1, "", 0)

    def close(self) -> None:
        self._alone = False
        super().close()
        self._stop()

    def _form(self, store: dist.Store, rank: int, world: int) -> None:
        signed = SignedStore(store, self.signer, f"{self.generation}/group/")
        if rank == 0:
            # In elastic mode Horovod asks for its rank under the name of its host and its local rank.
            places = {f"/rank_and_size/w{r}:0": f"{r},{world},0,1,{r},{world}".encode() for r in range(world)}
            self._server = Rendezvous(self.host, places)
            signed.write("rendezvous", f"{self.host} {self._server.port}".encode())
        store.wait(["rendezvous"])
        where = signed.read("rendezvous")
        if where is None:
            raise RuntimeError("the address of Horovod's rendezvous does not have this trial's signature")
        host, port = where.decode().split()
        _call_off(False)
        formed = threading.Event()
        watch = threading.Thread(
            target=self._call_off_if_one_dies, args=(signed, world, formed), name="fluid-forming", daemon=True
        )
        watch.start()
        try:
            self._start(rank, world, host, int(port))
        finally:
            formed.set()
            watch.join()

    def _call_off_if_one_dies(self, store: SignedStore, world: int, formed: threading.Event) -> None:
        """End the initialisation at once when a member dies: Horovod would wait 30 s for its address, 150 s to connect.

        The leader notices the death and tells the others. Followers notice the leader's death by themselves.
        """
        while not formed.wait(_LOOK_S):
            if self._server is None:
                try:
                    off = store.read("off") is not None
                except RuntimeError:
                    off = True
            else:
                off = self._dead(world) is not None
                if off:
                    store.write("off")
                    self._server.call_off()
            if off:
                _call_off(True)
                return

    def _dissolve(self, in_order: bool) -> None:
        self._stop()

    def _allreduce_(self, tensor: torch.Tensor) -> None:
        import horovod.torch as hvd

        hvd.allreduce_(tensor, op=hvd.Sum, name=_name("allreduce", tensor))

    def _broadcast_(self, tensor: torch.Tensor) -> None:
        import horovod.torch as hvd

        hvd.broadcast_(tensor, root_rank=0, name=_name("broadcast", tensor))

    def _give_up(self) -> None:
        """Nothing to do: Horovod's waits are not interrupted, so that `_look` is never called."""

    # -- the process' one Horovod --

    def _start(self, rank: int, world: int, host: str, port: int) -> None:
        import horovod.torch as hvd

        place = {
            "RANK": rank,
            "SIZE": world,
            "LOCAL_RANK": 0,
            "LOCAL_SIZE": 1,
            "CROSS_RANK": rank,
            "CROSS_SIZE": world,
            "HOSTNAME": f"w{rank}",
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
            "GLOO_IFACE": interface_of(self.host),
            "GLOO_TIMEOUT_SECONDS": math.ceil(self.form_timeout),
        }
        # A leader whose report waits for Tune would count as a stall.
        place["STALL_CHECK_DISABLE"] = 1
        group: dict[str, Any] = {"GLOO_RENDEZVOUS_ADDR": None, "GLOO_RENDEZVOUS_PORT": None, "ELASTIC": None}
        if world > 1:
            # Without ELASTIC a worker on a GPU waits for ever for one that died.
            group = {"GLOO_RENDEZVOUS_ADDR": host, "GLOO_RENDEZVOUS_PORT": port, "ELASTIC": 1}
        for name, value in {**place, **group}.items():
            if value is None:
                os.environ.pop(f"HOROVOD_{name}", None)
            else:
                os.environ[f"HOROVOD_{name}"] = str(value)
        # It would only log that another worker is gone, which GroupLost says.
        os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")
        self._running = True
        try:
            hvd.init()
        except Exception as error:
            self._stop()
            raise RuntimeError(f"Horovod could not be initialised: {error}") from error

    def _stop(self) -> None:
        if self._running:
            import horovod.torch as hvd

            hvd.shutdown()
            self._running = False
        if self._server is not None:
            self._server.close()
            self._server = None


def _call_off(off: bool) -> None:
    """Let an ``hvd.init`` of this process that waits for others fail at once. ``off`` False: later ones may wait again.

    Does nothing if Horovod was not built by `tools.horovod`.
    """
    from horovod.torch.mpi_ops import _basics

    library = _basics.MPI_LIB_CTYPES
    if hasattr(library, "horovod_call_off_init"):
        library.horovod_call_off_init(off)


def _name(what: str, tensor: torch.Tensor) -> str:
    """A tensor's name that is the same on all ranks; Horovod's own numbers differ after a resize. It caches by name."""
    return f"fluidtune.{what}.{tensor.dtype}.{tensor.numel()}"
