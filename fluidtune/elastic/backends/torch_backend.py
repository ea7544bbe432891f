"""torch.distributed as a collective backend: gloo on CPUs, gloo and NCCL on GPUs.

Each generation is the process' default process group, so nothing else in the process may use torch.distributed.
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
        # By default gloo listens on the interface of the machine's name, which the other workers may not reach.
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(self.host)
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
