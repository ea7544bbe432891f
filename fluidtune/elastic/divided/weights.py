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

from .tensor_link import Layout, Link, SharedMemory, layout_of, places
from .torch_private import version

#: By the bytes of an element, a type by which bytes are compared.
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class SentWeights:
    """What one follower has of a module's weights. ``area``: see `PublishedWeights`; ``stamps``: by tensor."""

    area: int = -1
    stamps: list[int] = field(default_factory=list)


class _Area:
    """The weights on cores, in memory that followers can map; ``layouts``: of all, those on a GPU have no place."""

    def __init__(self, layouts: Sequence[Layout], memory: SharedMemory, write: bool) -> None:
        own = [i for i, layout in enumerate(layouts) if not layout[3]]
        starts, size = places([layouts[i] for i in own])
        memory.grow(size) if write else memory.map(size)
        self.memory = memory
        self.views = {i: memory.view(at, layouts[i]) for i, at in zip(own, starts, strict=True)}


class PublishedWeights:
    """The leader's side, for one module. ``tensors``: by number, see `Description`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._layouts = [layout_of(tensor) for tensor in tensors]
        self._stamps = [0] * len(tensors)
        #: By number of a tensor on a GPU, what it was known by.
        self._known: dict[int, Any] = {}
        #: Of zeros, until the first `publish`.
        self._area = _Area(self._layouts, SharedMemory(), write=True)
        #: Counts the areas.
        self._areas = 1

    def publish(self, graphs: bool) -> None:
        """Take in what has changed. ``graphs``: followers have graphs that need the weights as they were."""
        changed = [i for i, tensor in enumerate(self._tensors) if self._has_changed(i, tensor.detach())]
        on_cores = [i for i in changed if not self._layouts[i][3]]
        if graphs and on_cores:
            before, self._area = self._area, _Area(self._layouts, SharedMemory(), write=True)
            self._areas += 1
            for i, view in self._area.views.items():
                view.copy_(before.views[i])
        for i in changed:
            self._stamps[i] += 1
        for i in on_cores:
            self._area.views[i].copy_(self._tensors[i].detach())

    def _has_changed(self, i: int, tensor: torch.Tensor) -> bool:
        if self._layouts[i][3]:
            now = (version(tensor), tensor.data_ptr(), float(tensor.sum(dtype=torch.float64)))
            before, self._known[i] = self._known.get(i), now
            return self._tensors[i].requires_grad or before != now
        return not same_bytes(tensor, self._area.views[i])

    def send(self, link: Link, key: int, has: dict[int, SentWeights]) -> None:
        """Send a follower what it lacks. ``has``: what it has, by key of a module."""
        area, sent = self._area, has.setdefault(key, SentWeights())
        stamps = sent.stamps or [-1] * len(self._stamps)
        changed = [i for i, stamp in enumerate(self._stamps) if stamp != stamps[i]]
        new = sent.area != self._areas
        if link.shares:  # what is new on cores is in memory that the follower has mapped
            changed = [i for i in changed if self._layouts[i][3]]
        if changed or (link.shares and new):
            values = [self._tensors[i].detach() if self._layouts[i][3] else area.views[i] for i in changed]
            file = area.memory.file if link.shares and new else None
            link.send("weights", (key, changed, self._layouts, file is not None), values, file)
        sent.area, sent.stamps = self._areas, list(self._stamps)


class ReplicaWeights:
    """The follower's side, for one module. ``trained``: by number, whether it gets a gradient."""

    def __init__(self, trained: Sequence[bool]) -> None:
        self.trained = trained
        #: By number, what replicas compute with.
        self.tensors: list[torch.Tensor] = []

    def take(self, changed: Sequence[int], layouts: list[Layout], new: bool, values: Sequence[Any], link: Link) -> None:
        """What the leader has sent: ``values``, of the tensors ``changed``; ``new``: with an area of memory."""
        found: dict[int, torch.Tensor] = {i: value.clone() for i, value in zip(changed, values, strict=True)}
        if new:
            area = _Area(layouts, SharedMemory(link.take_file()), write=False)
            found.update(area.views)
        if not self.tensors:
            self.tensors = [
                torch.nn.Parameter(found[i]) if trained else found[i] for i, trained in enumerate(self.trained)
            ]
            return
        for i, value in found.items():  # not in place: a graph may need what was there
            self.tensors[i].data = value


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one type and shape have the same bytes: -0.0 is not 0.0, and NaN is NaN."""
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    whole = _WHOLE_NUMBERS[one.dtype.itemsize]
    return torch.equal(one.view(whole), other.view(whole))
