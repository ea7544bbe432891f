"""torch.distributed as a collective backend: gloo on CPUs, gloo and NCCL on GPUs.

Each generation is the process' default process group, so it must be the only user of torch.distributed in it.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from .base import PATIENCE, CollectiveBackend


class TorchBackend(CollectiveBackend):
    """Tensors on the CPU go through gloo, those on a GPU through NCCL."""

    def _form(self, store: dist.Store, rank: int, world: int) -> None:
        # gloo listens where the machine's name points to, which need not be where the peers are
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(self.host)
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=self.form_timeout),
            )
            # Short to connect, long to wait for an iteration's end: nothing public tells these apart
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE))
        except BaseException:
            if dist.is_initialized():
                dist.destroy_process_group()
            raise

    def _dissolve(self) -> None:
        dist.destroy_process_group()

    def _allreduce_(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def _broadcast_(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=0)


def interface_of(host: str) -> str:
    """The network interface that has this IP address, as "lo" or "eth0".

    Raises ValueError with the addresses there are when none has it.
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
