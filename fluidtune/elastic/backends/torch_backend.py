"""torch.distributed as a collective backend: gloo on CPUs, gloo and NCCL on GPUs.

Each generation is the process' default process group, so nothing else in the process may use torch.distributed.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from .base import PATIENCE, CollectiveBackend
from .lockstep import LOOK_S


class TorchBackend(CollectiveBackend):
    """Tensors on the CPU go through gloo, those on a GPU through NCCL."""

    def _form(self, store: dist.Store, rank: int, world: int) -> None:
        # By default gloo listens on the interface of the machine's name, which the other workers may not reach.
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(self.host)
        before = set(os.listdir(_OPEN_FILES))
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=self.form_timeout),
            )
            # Short for connecting, long for the end of an iteration: no public function sets the two apart.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE))
            self._sockets = _connections(set(os.listdir(_OPEN_FILES)) - before)
        except BaseException:
            if dist.is_initialized():
                dist.destroy_process_group()
            raise

    def _dissolve(self) -> None:
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
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            self._look()

    def _give_up(self) -> None:
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
