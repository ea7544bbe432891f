"""The memory of alike models: their parameters lie one beside the other, and each model's own tensors are parts of it.

So a call of all models copies no parameter, and each model's optimizer, ``state_dict`` and code see their own. A part
is a tensor with a storage of its own size (made by DLPack), so that what a trial saves or copies has no neighbour's
numbers in it. A model that leaves gets memory of its own again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor as T

from .alikeness import Attributes, Parts, Shape, parts
from .stacked_tensor import NotFusable


def part(of: T) -> T:
    """The same memory as ``of``, as a tensor with a storage of its own."""
    return torch.from_dlpack(of)


class Slot:
    """One trial's model in a `Stack`."""

    def __init__(self, trial: Any, model: torch.nn.Module) -> None:
        self.trial, self.model = trial, model
        self.parts: Parts = parts(model)
        self.attributes = Attributes(self.parts.modules)
        #: Which row of the stack it is; None: its tensors have memory of their own.
        self.row: int | None = None
        #: The stack that it is in; None: it is trained by itself. See `Stack.variant`.
        self.stack: Stack | None = None
        self.variant: int | None = None
        #: Where its parameters and buffers were put.
        self.pointers: list[int] = []
        #: The gradients that the last common backward pass left for it: all models' gradients, and its row in them.
        self.gradients: tuple[T, int] | None = None

    @property
    def learns(self) -> tuple[bool, ...]:
        return tuple([p.requires_grad for p in self.parts.parameters])

    def versions(self) -> list[int]:
        return [p._version for p in self.parts.parameters]


class Stack:
    """The models of one `Shape`, of which each trial has one here."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.slots: list[Slot] = []
        #: Why models of this shape are not trained as one; None: they are.
        self.reason: str | None = None
        #: Seconds of the last common work, by its kind.
        self.took: dict[str, float] = {}
        #: The kinds of calls in which what dropout drew was found to be what a trial alone draws.
        self.compared: set[Hashable] = set()
        sizes = [size.numel() for _, size, _, _ in shape.parameters]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        #: Where each parameter is in a row.
        self.columns = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        #: All parameters, (models, numbers of a model); each parameter of all models; each buffer of all models.
        self.flat: T = torch.empty(0)
        self.parameters: list[T] = []
        self.buffers: list[T] = []
        self._variants: list[list[Any]] = []
        self._settled = 0

    def add(self, slot: Slot) -> None:
        self.slots.append(slot)
        slot.stack = self

    def variant(self, slot: Slot) -> int:
        """A number that is equal for models whose plain attributes are equal."""
        if slot.attributes.changed() or slot.variant is None:
            values = slot.attributes.values
            slot.variant = next((i for i, known in enumerate(self._variants) if known == values), len(self._variants))
            if slot.variant == len(self._variants):
                self._variants.append(values)
        return slot.variant

    @property
    def settled(self) -> bool:
        """Whether each model has a row, and no row is left over."""
        return self._settled == len(self.slots) == len(self.flat) and all(slot.row is not None for slot in self.slots)

    def settle(self) -> None:
        """Put the parameters and buffers of all models beside each other."""
        if self.settled:
            return
        like = self.slots[0].parts.parameters[0]
        count = len(self.slots)
        self.flat = torch.empty(count, self.columns[-1].stop, dtype=like.dtype, device=like.device)
        self.buffers = [
            torch.empty(count, *size, dtype=dtype, device=device) for _, size, dtype, device in self.shape.buffers
        ]
        # `.data`: a change of one model's row is not one of the tensors that another model's backward pass has kept.
        self.parameters = [view.data for view in self.views(self.flat)]
        with torch.no_grad():
            for row, slot in enumerate(self.slots):
                for p, view in zip(slot.parts.parameters, self.parameters, strict=True):
                    view[row].copy_(p)
                    p.data = part(view[row])
                for b, of_all in zip(slot.parts.buffers, self.buffers, strict=True):
                    of_all[row].copy_(b)
                    b.data = part(of_all[row])
                slot.row = row
                slot.pointers = [tensor.data_ptr() for tensor in slot.parts.parameters + slot.parts.buffers]
        self._settled = count

    def views(self, flat: T) -> list[T]:
        """Each parameter of all models, as part of memory that is laid out as ``flat`` is."""
        return [
            flat[:, columns].view(len(flat), *size)
            for columns, (_, size, _, _) in zip(self.columns, self.shape.parameters, strict=True)
        ]

    def moved(self, slot: Slot) -> str | None:
        """The first parameter or buffer that is not where it was put, in words."""
        at = slot.parts
        tensors: list[T] = [*at.parameters, *at.buffers]
        for (holder, name), tensor, pointer in zip(
            at.parameter_places + at.buffer_places, tensors, slot.pointers, strict=True
        ):
            if holder.get(name) is not tensor or tensor.data_ptr() != pointer:  # type: ignore[union-attr]
                return name
        return None

    def remove(self, slot: Slot) -> None:
        """Give this model memory of its own again."""
        if slot.stack is not self:
            return
        self.slots.remove(slot)
        slot.stack = slot.gradients = None
        if slot.row is None:
            return
        slot.row = None
        with torch.no_grad():
            for tensor in (*slot.parts.parameters, *slot.parts.buffers):
                tensor.data = tensor.detach().clone()

    def refuse(self, reason: str) -> None:
        """Train these models one by one from now on."""
        self.reason = reason
        for slot in list(self.slots):
            self.remove(slot)


def rows_of(of_all: T, rows: Sequence[int]) -> T:
    """Some rows: a view where they follow each other, else a copy."""
    first, count = rows[0], len(rows)
    if list(rows) == list(range(first, first + count)):
        return of_all if count == len(of_all) else of_all[first : first + count]
    return of_all[list(rows)]


def put_rows(of_all: T, rows: Sequence[int], values: T) -> None:
    """Write what `rows_of` gave, and was changed since."""
    if values.data_ptr() != of_all[rows[0]].data_ptr():
        of_all.data[list(rows)] = values  # `.data`: not a change for a graph that has kept other rows


def refuse_shared(slot: Slot, known: Iterable[Slot]) -> None:
    """
    Raises:
        NotFusable: another model that was prepared has one of these parameters.
    """
    mine = {id(p) for p in slot.parts.parameters}
    if any(mine & {id(p) for p in other.parts.parameters} for other in known):
        raise NotFusable("another prepared model has some of its parameters")
