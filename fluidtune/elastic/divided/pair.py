"""Tensors on GPUs go from one process to the other by NCCL, in a group of these two that is none of the script's.

Each transfer is waited for while the connection beside it is watched: a process that dies leaves a transfer that never
ends, and only giving the group up ends that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist

from . import tensor_link

#: No watchdog of torch's ends the process or blocks a thread, as the connection says who is gone: torch's docs,
#: "ProcessGroupNCCL Environment Variables".
SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
#: Seconds for the two processes to meet. Judgement: NCCL connects in some seconds.
_MEET_S = 60.0
#: Seconds between two looks at a transfer that is not over.
_LOOK_S = 5e-5


def nccl(store: dist.Store, rank: int) -> Any:
    """A group of two GPUs."""
    os.environ.update(SETTINGS)
    return dist.ProcessGroupNCCL(store, rank, 2, timedelta(days=1))


class Pair:
    """One end. ``port``: where the leader's end meets the follower's; None: this is the leader's. ``group``: what makes
    the group of the two, by its name in `KINDS`.
    """

    def __init__(self, host: str, port: int | None, group: str) -> None:
        self._rank = 0 if port is None else 1
        wait = timedelta(seconds=_MEET_S)
        self._store = dist.TCPStore(host, port or 0, 2, port is None, wait, wait_for_workers=False)
        self._make = resolve_name(group)
        self._group: Any = None

    @property
    def port(self) -> int:
        """Where the other end finds this one."""
        return int(self._store.port)

    def meet(self) -> None:
        """Both ends call it."""
        self._group = self._make(dist.PrefixStore("pair", self._store), self._rank)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor goes by NCCL."""
        return tensor_link.on_accelerator(tensor) and tensor.numel() > 0

    def send(self, tensors: Sequence[torch.Tensor], gone: Callable[[], bool]) -> None:
        """``gone``: whether the other end is. Raises ConnectionResetError then."""
        for tensor in tensors:
            self._over(self._begun(self._group.send, tensor), gone)

    def receive(self, tensors: Sequence[torch.Tensor], gone: Callable[[], bool]) -> None:
        """Fill these tensors. Raises as `send`."""
        for tensor in tensors:
            self._over(self._begun(self._group.recv, tensor), gone)

    def _begun(self, transfer: Callable[..., Any], tensor: torch.Tensor) -> Any:
        """NCCL connects the two in the first transfer, and may refuse to."""
        try:
            # A complex tensor goes as one of pairs of numbers.
            return transfer([torch.view_as_real(tensor) if tensor.is_complex() else tensor], 1 - self._rank, 0)
        except RuntimeError as error:
            raise ConnectionResetError(f"the transfer failed: {error}") from error

    def _over(self, work: Any, gone: Callable[[], bool]) -> None:
        while not work.is_completed():
            if gone():
                self.close()
                raise ConnectionResetError("the other process is gone")
            time.sleep(_LOOK_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise ConnectionResetError(f"the transfer failed: {error}") from error

    def close(self) -> None:
        """End what is under way; idempotent."""
        group, self._group = self._group, None
        with suppress(RuntimeError, AttributeError):
            group.abort()
