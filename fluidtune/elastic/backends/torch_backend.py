"""torch.distributed as a collective backend: gloo on CPUs, gloo and NCCL on GPUs.

Each generation is the process' default process group, so nothing else in the process may use torch.distributed.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ..errors import CannotDivide
from .base import PATIENCE, CollectiveBackend
from .lockstep import LOOK_S, Place
from .stuck_collectives import StuckCollectives

#: Read when an NCCL communicator is made. torch, docs on ProcessGroupNCCL's environment variables: with 0, the watchdog
#: leaves errors and time-outs to us (`StuckCollectives`); the monitor would end the process if an abort took long.
_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class TorchBackend(CollectiveBackend):
    """Tensors on the CPU go through gloo, those on a GPU through NCCL."""

    def __init__(
        self, host: str = "127.0.0.1", device: str = "cpu", form_timeout: float = 30.0, secret: bytes = b""
    ) -> None:
        super().__init__(host, device, form_timeout, secret)
        #: Watches the collectives on a GPU; None: this worker has none, or is in no group.
        self._stuck: StuckCollectives | None = None
        self._waits_on_cpu = False
        self._next_look = 0.0  # when the GPU's collective is compared with the others', by time.monotonic()

    def _form(self, store: dist.Store, rank: int, world: int) -> None:
        # By default gloo listens on the interface of the machine's name, which the other workers may not reach.
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(self.host)
        before = set(os.listdir(_OPEN_FILES))
        try:
            self._init_process_group(store, rank, world)
            # Short for connecting, long for the end of an iteration: no public function sets the two apart.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE))
            self._sockets = _connections(set(os.listdir(_OPEN_FILES)) - before)
            gpu = self._gpu()
            if gpu is not None:
                self._refuse_shared_gpus(store, gpu, rank, world)
                self._stuck = StuckCollectives(self._hopeless, self._abandon)
        except BaseException:
            if dist.is_initialized():
                dist.destroy_process_group()
            raise

    def _init_process_group(self, store: dist.Store, rank: int, world: int) -> None:
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            os.environ.update(_NCCL_SETTINGS)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=self.form_timeout),
        )

    def _gpu(self) -> str | None:
        """The UUID of this worker's GPU; None: it has none."""
        return str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else None

    def _refuse_shared_gpus(self, store: dist.Store, gpu: str, rank: int, world: int) -> None:
        """CannotDivide on all workers if two of them are on one GPU, which NCCL does not allow."""
        store.set(f"gpu/{rank}", gpu)
        gpus = [store.get(f"gpu/{other}").decode() for other in range(world)]
        for later, name in enumerate(gpus):
            first = gpus.index(name)
            if first < later:
                self._lost, self._apart = f"workers {first} and {later} of the trial have one GPU, {name}", True
                raise CannotDivide(f"{self._lost}: NCCL needs one for each; give every worker a GPU of its own")

    def _dissolve(self, in_order: bool) -> None:
        if self._stuck is not None:
            self._stuck.close()
            self._stuck = None
            if not in_order:
                self._abort_on_gpu()
        dist.destroy_process_group()

    # Gloo pairs up the collectives of one kind by their order, and ends the process if their sizes differ. So what can
    # meet in a loop that leaves a step out has a kind of its own: gradients, batch statistics, exchanges, broadcasts.

    def _allreduce_(self, tensor: torch.Tensor) -> None:
        self._wait(dist.all_reduce(tensor, async_op=True), tensor)

    def _broadcast_(self, tensor: torch.Tensor) -> None:
        self._wait(dist.broadcast(tensor, src=0, async_op=True), tensor)

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
        rows = row.new_empty(self.world, *row.shape)
        self._wait(dist.all_gather(list(rows.unbind()), row.contiguous(), async_op=True), row)
        return rows

    def _exchange(self, note: torch.Tensor) -> torch.Tensor:
        notes = note.new_empty(self.world, *note.shape)
        self._wait(dist.all_to_all_single(notes, note.expand_as(notes).contiguous(), async_op=True), note)
        return notes

    def _wait(self, work: Any, tensor: torch.Tensor) -> None:
        """Wait for a collective. On a GPU, only the GPU waits."""
        if tensor.is_cuda:
            self._let_gpu_wait(work)
            return
        self._waits_on_cpu = True
        try:
            while True:
                try:
                    work.wait(timedelta(seconds=LOOK_S))
                    return
                except RuntimeError:
                    if work.is_completed():
                        raise
                self._look()
        finally:
            self._waits_on_cpu = False

    # -- on a GPU --

    def _let_gpu_wait(self, work: Any) -> None:
        assert self._stuck is not None and self._lockstep is not None
        self._stuck.watch(work, self._lockstep.place)
        work.wait()

    def _hopeless(self, place: Place) -> str | None:
        """See `StuckCollectives`. A collective on the CPU that waits compares itself with the others'."""
        why = self._death()
        now = time.monotonic()
        lockstep = self._lockstep  # None: the group was dissolved meanwhile
        if why is None and lockstep is not None and not self._waits_on_cpu and now >= self._next_look:
            self._next_look = now + LOOK_S
            with suppress(RuntimeError, OSError):  # the leader is gone: the next look sees it
                why = lockstep.look_from_gpu(place)
                self._apart = why is not None
        return why

    def _abandon(self, why: str) -> None:
        self._lost = why
        self._give_up()

    def _abort_on_gpu(self) -> None:
        """End the kernels of collectives that are on their way; none of this group begins any more. Any thread."""
        backend: Any = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
        backend.abort()

    def _give_up(self) -> None:
        if self._stuck is not None:
            self._abort_on_gpu()
        for place, inode in self._sockets.items():
            with suppress(OSError):
                if os.stat(f"{_OPEN_FILES}/{place}").st_ino == inode:
                    connection = socket.socket(fileno=os.dup(place))
                    connection.shutdown(socket.SHUT_RDWR)
                    connection.close()


#: Where Linux shows a process its open files, by number: proc(5).
_OPEN_FILES = "/proc/self/fd"


def _connections(files: set[str]) -> dict[int, int]:
    """Of these open files, those that are connections: number and inode. The others may be closed by now."""
    found = {}
    for place in map(int, files):
        with suppress(OSError):
            connection = socket.socket(fileno=os.dup(place))
            with connection:
                connection.getpeername()
                found[place] = os.stat(f"{_OPEN_FILES}/{place}").st_ino
    return found


def interface_of(host: str) -> str:
    """The network interface that has this IP address, as "lo" or "eth0".

    ValueError, which names the addresses of this machine, if no interface has it.
    """
    families = (socket.AF_INET, socket.AF_INET6)
    have: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in families:
                have.setdefault(address.address.split("%")[0], name)
    if host not in have:
        raise ValueError(f"no interface of this machine has the address {host}, only {sorted(have)}")
    return have[host]
