"""Weights go out when their bytes have changed, and never over those that a graph still needs.

Whether they have changed cannot be told by ``_version``: fused optimizers do not count, nor does a write to ``.data``.
On cores the leader keeps what it has sent in memory that the followers of its machine have mapped, and compares bytes;
their replicas compute with that memory. A GPU's tensors are compared by sums, where they are not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .wire import Layout, Link, SharedMemory, layout_of, places

#: By the bytes of an element, a type by which bytes are compared.
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class SentWeights:
    """What one follower has of a module's weights. ``area``: see `PublishedWeights`; ``stamps``: by tensor."""

    area: int = -1
    stamps: list[int] = field(default_factory=list)


class PublishedWeights:
    """The leader's side, for one module. ``tensors``: by number, see `Description`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._layouts = [layout_of(tensor) for tensor in tensors]
        self._stamps = [0] * len(tensors)
        self._sums: list[Any] = [None] * len(tensors)
        #: Counts the memories that the weights were written to.
        self._area = 0
        self._memory: SharedMemory | None = None
        self._views: list[torch.Tensor] = []
        self._on_gpu = any(tensor.is_cuda for tensor in tensors)

    def _begin(self) -> None:
        starts, size = places(self._layouts)
        if self._memory is not None:
            self._memory.close()
        self._memory = SharedMemory()
        self._memory.grow(size)
        self._views = [self._memory.view(at, layout) for at, layout in zip(starts, self._layouts, strict=True)]
        self._area += 1

    def publish(self, graphs: bool) -> None:
        """Take in what has changed. ``graphs``: followers have graphs that need the weights as they were."""
        fresh = self._memory is None
        if fresh:
            self._begin()
        changed = [i for i, tensor in enumerate(self._tensors) if fresh or self._has_changed(i, tensor.detach())]
        if not changed:
            return
        if graphs and not fresh:
            before = self._views
            self._begin()
            torch._foreach_copy_(self._views, before)
        for i in changed:
            self._views[i].copy_(self._tensors[i].detach())
            self._stamps[i] += 1

    def _has_changed(self, i: int, tensor: torch.Tensor) -> bool:
        if tensor.is_cuda:
            now = (tensor._version, tensor.data_ptr(), float(tensor.sum(dtype=torch.float64)))
            before, self._sums[i] = self._sums[i], now
            return self._tensors[i].requires_grad or before != now
        return not same_bytes(tensor, self._views[i])

    def send(self, link: Link, key: int, sent: SentWeights) -> None:
        """Send a follower what it lacks."""
        stamps = sent.stamps or [-1] * len(self._stamps)
        changed = [i for i, stamp in enumerate(self._stamps) if stamp != stamps[i]]
        if sent.area == self._area and (not changed or (link.shares and not self._on_gpu)):
            return  # what is new is in memory that the follower has mapped
        assert self._memory is not None
        if link.shares:
            new = self._memory.file if sent.area != self._area else None
            link.send("weights", (key, changed, self._layouts, new is not None), file=new)
        else:
            link.send("weights", (key, changed, self._layouts, False), [self._views[i] for i in changed])
        sent.area, sent.stamps = self._area, list(self._stamps)

    def close(self) -> None:
        """Let go of the memory; idempotent."""
        if self._memory is not None:
            self._memory.close()
        self._views = []


class ReplicaWeights:
    """The follower's side, for one module. ``device``: where those are that the leader has on a GPU."""

    def __init__(self, trained: Sequence[bool], device: torch.device) -> None:
        self.trained, self._device = trained, device
        #: By number, what replicas compute with.
        self.tensors: list[torch.Tensor] = []
        self._memory: SharedMemory | None = None
        self._views: list[torch.Tensor] = []

    def take(self, changed: Sequence[int], layouts: list[Layout], link: Link, values: Any, new: bool) -> None:
        """What the leader has sent. ``new``: it has written to another memory. ``values``: without shared memory."""
        if link.shares and new:
            self._map(layouts, link.take_file())
        at = dict(zip(changed, values, strict=True)) if not link.shares else {i: self._views[i] for i in changed}
        if not self.tensors:
            self.tensors = [self._made(i, at[i], layouts[i]) for i in range(len(layouts))]
            return
        for i, tensor in enumerate(self.tensors):
            if link.shares and not layouts[i][3]:
                if new:
                    tensor.data = self._views[i]
            elif i in at:  # a graph may still need what was there
                tensor.data = at[i].to(tensor.device, copy=True)

    def _map(self, layouts: list[Layout], file: int) -> None:
        starts, size = places(layouts)
        self._memory = SharedMemory(file)
        self._memory.map(size)
        self._views = [self._memory.view(at, layout) for at, layout in zip(starts, layouts, strict=True)]
        self._memory.close()

    def _made(self, i: int, value: torch.Tensor, layout: Layout) -> torch.Tensor:
        if layout[3]:
            value = value.to(self._device, copy=True)
        elif self._memory is None:
            value = value.clone()
        return torch.nn.Parameter(value, requires_grad=True) if self.trained[i] else value


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one type and shape have the same bytes: -0.0 is not 0.0, and NaN is NaN."""
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    whole = _WHOLE_NUMBERS[one.dtype.itemsize]
    return torch.equal(one.view(whole), other.view(whole))
