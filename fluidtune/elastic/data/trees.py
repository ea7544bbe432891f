"""Trees of dicts, lists and tuples with tensors in them, copied to the CPU.

A copy is as the tensor was: type, shape, order in memory (strides), ``requires_grad``, and what it shares with other
tensors of the tree. Fused kernels pair elements by their place in memory, and an optimizer may keep views of one
buffer, so a tensor whose elements are all right would not do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

#: Bytes to which each tensor in a buffer is aligned: the size of the largest element type, complex128.
_ALIGN = 16


def map_tensors(on_tensor: Callable[[torch.Tensor], Any], tree: Any, on_leaf: Callable[[Any], Any]) -> Any:
    """The same tree with every tensor and every other leaf replaced."""
    if isinstance(tree, torch.Tensor):
        return on_tensor(tree)
    if isinstance(tree, dict):
        items = [(key, map_tensors(on_tensor, value, on_leaf)) for key, value in tree.items()]
        if type(tree) is OrderedDict:
            ordered = OrderedDict(items)
            ordered.__dict__.update(tree.__dict__)  # a module's state_dict carries its versions in _metadata
            return ordered
        return dict(items) if type(tree) is dict else on_leaf(tree)
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(on_tensor, value, on_leaf) for value in tree)
    return on_leaf(tree)


def copied(tree: Any, on_leaf: Callable[[Any], Any]) -> Any:
    """The tree with a copy of each tensor on the CPU. ``on_leaf`` copies what is no tensor."""
    shared = _Shared(tree)
    bases = [base.to("cpu", copy=True) for base in shared.bases]

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        number = shared.number_of(tensor)
        if number is None:
            return _as_it_was(tensor.detach().to("cpu", copy=True), _learns(tensor))
        offset = _begin(tensor) - shared.begins[number]
        return _view(bases[number], offset, _Kind.of(tensor, tuple(tensor.stride())))

    return map_tensors(copy, tree, on_leaf)


def on_devices(tree: Any) -> list[bool]:
    """For each tensor of the tree, in their order, whether it is elsewhere than on the CPU."""
    return [tensor.device.type != "cpu" for tensor in _tensors(tree)]


def put_back(tree: Any, on_device: list[bool], device: torch.device) -> Any:
    """A copied tree with those tensors on ``device`` that were on one, as `on_devices` has said."""
    where = iter(on_device)
    return map_tensors(lambda tensor: tensor.to(device) if next(where) else tensor, tree, lambda leaf: leaf)


@dataclass(frozen=True)
class _Kind:
    """What a dense tensor is besides its bytes. ``strides``: in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    learns: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, strides: tuple[int, ...]) -> _Kind:
        return cls(tuple(tensor.shape), strides, tensor.dtype, _learns(tensor))


class _Shared:
    """The memory that several tensors of a tree have in common, by a number. ``bases``: its bytes.

    ``begins``: where it begins, as an address.
    """

    def __init__(self, tree: Any) -> None:
        of_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in _tensors(tree):
            if _can_share(tensor):
                of_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self.begins: list[int] = []
        self.bases: list[torch.Tensor] = []
        self._spans: dict[int, list[tuple[int, int, int]]] = {}
        for start, tensors in of_storage.items():
            for begin, end, count in _overlapping([(_begin(each), _end(each)) for each in tensors]):
                if count > 1:
                    begin -= (begin - start) % _ALIGN
                    whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
                    whole.set_(tensors[0].untyped_storage(), begin - start, (end - begin,), (1,))
                    self._spans.setdefault(start, []).append((begin, end, len(self.bases)))
                    self.begins.append(begin)
                    self.bases.append(whole)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the memory that the tensor has in common with others; None: it has its own."""
        if not self._spans or not _can_share(tensor):
            return None
        spans = self._spans.get(tensor.untyped_storage().data_ptr(), ())
        return next((number for begin, end, number in spans if begin <= _begin(tensor) < end), None)


def _overlapping(spans: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """The spans with those joined that overlap: where each begins and ends, and of how many it consists."""
    found: list[tuple[int, int, int]] = []
    for begin, end in sorted(spans):
        if found and begin < found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end), found[-1][2] + 1)
        else:
            found.append((begin, end, 1))
    return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(found.append, tree, lambda leaf: leaf)
    return found


def _can_share(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie in memory as they are."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _begin(tensor: torch.Tensor) -> int:
    return int(tensor.data_ptr())


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.data_ptr()) + (last + 1) * tensor.element_size()


def _view(data: torch.Tensor, begin: int, kind: _Kind) -> torch.Tensor:
    """The tensor of this kind whose first element is at byte ``begin`` of the bytes ``data``."""
    offset = begin // kind.dtype.itemsize
    made = torch.empty(0, dtype=kind.dtype, device=data.device)
    return _as_it_was(made.set_(data.untyped_storage(), offset, kind.shape, kind.strides), kind.learns)


def _learns(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


def _as_it_was(tensor: torch.Tensor, learns: bool) -> torch.Tensor:
    return tensor.requires_grad_() if learns else tensor
