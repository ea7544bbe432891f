"""Trees of dicts, lists and tuples with tensors in them: copied to the CPU, and sent to all workers of a group.

A tensor arrives as it was: type, shape, order in memory (strides), ``requires_grad``, and what it shares with other
tensors of the tree. Fused kernels pair elements by their place in memory, and an optimizer may keep views of one
buffer, so a tensor whose elements are all right would not do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .base import CollectiveBackend

#: Bytes of the buffers in which tensors are sent: the most memory that sending takes at a time.
_PIECE = 32 * 2**20
#: Bytes to which each tensor in a buffer is aligned: the size of the largest element type, complex128.
_ALIGN = 16
#: Layouts that are sent by their parts.
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


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


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor of this shape without gaps, in the order in memory of this one. Of a strided tensor."""
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return tuple(tensor.stride())
    return tuple(torch.empty_like(tensor, device="meta").stride())


def unsendable(tree: Any) -> str | None:
    """Why this tree cannot be sent, in words."""
    for tensor in _tensors(tree):
        if tensor.layout not in _SPARSE | {torch.strided}:
            return f"a tensor of layout {tensor.layout}"
        if tensor.device.type == "meta":
            return "a tensor without data (device meta)"
        if tensor.is_quantized:
            return f"a quantized tensor ({tensor.dtype})"
    return None


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


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a tree that is sent without its tensors; ``offset`` and ``size`` in bytes of a piece.

    ``base``: the number of the bytes that it shares with others; None: they are its own. ``within``: where it begins.
    """

    piece: int
    offset: int
    size: int
    kind: _Kind
    base: int | None = None
    within: int = 0


@dataclass(frozen=True)
class _Sparse:
    """Stands for a sparse tensor. ``parts``: its indices and values."""

    parts: tuple[Any, ...]
    shape: tuple[int, ...]
    layout: torch.layout


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


def broadcast_tree(tree: Any, backend: CollectiveBackend) -> Any:
    """The tree of rank 0, on every rank: its structure is sent as one object, its tensors as raw bytes in large pieces.

    Tensors on the backend's device are sent from there, those on the CPU from the CPU. No tensor is pickled.
    """
    if backend.rank == 0:
        sent = _Sent(tree)
        skeleton = map_tensors(sent.place, tree, lambda leaf: leaf)
        backend.broadcast_object((skeleton, list(zip(sent.sizes, sent.kinds, strict=True))))
        for piece in sent.pieces:
            backend.broadcast_(torch.cat(piece))
        return tree
    skeleton, layout = backend.broadcast_object()
    received = []
    for size, kind in layout:
        device = torch.device("cpu") if kind == "cpu" else backend.device
        received.append(torch.empty(size, dtype=torch.uint8, device=device))
        backend.broadcast_(received[-1])
    bases: dict[int, torch.Tensor] = {}

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, _Sparse):
            return _assembled(leaf, [pick(part) for part in leaf.parts])
        if not isinstance(leaf, _Slot):
            return leaf
        data = received[leaf.piece][leaf.offset : leaf.offset + leaf.size]
        if leaf.base is not None:
            if leaf.base not in bases:
                bases[leaf.base] = data.clone()
            return _view(bases[leaf.base], leaf.within, leaf.kind)
        # Cloned: Generator.set_state crashes on a tensor that does not begin at the start of its storage.
        return _view(data.clone(), 0, leaf.kind)

    return map_tensors(lambda tensor: tensor, skeleton, pick)


class _Sent:
    """The pieces in which a tree's tensors are sent, and where each one is in them."""

    def __init__(self, tree: Any) -> None:
        self.pieces: list[list[torch.Tensor]] = []
        self.sizes: list[int] = []
        self.kinds: list[str] = []
        self._shared = _Shared(tree)
        self._placed: dict[int, tuple[int, int, int]] = {}

    def place(self, tensor: torch.Tensor) -> Any:
        """What stands for the tensor in the tree's skeleton. Raises TypeError for one that is `unsendable`."""
        why = unsendable(tensor)
        if why is not None:
            raise TypeError(f"{why} cannot be sent to another worker")
        if tensor.layout in _SPARSE:
            parts = tuple(self.place(part) for part in _parts(tensor))
            return _Sparse(parts, tuple(tensor.shape), tensor.layout)
        number = self._shared.number_of(tensor)
        if number is not None:
            if number not in self._placed:
                self._placed[number] = self._put(self._shared.bases[number])
            kind = _Kind.of(tensor, tuple(tensor.stride()))
            return _Slot(*self._placed[number], kind, number, _begin(tensor) - self._shared.begins[number])
        strides = dense_strides(tensor)
        dense = tensor.detach().resolve_conj().resolve_neg()
        if tuple(dense.stride()) != strides:
            dense = torch.empty_strided(dense.shape, strides, dtype=dense.dtype, device=dense.device).copy_(dense)
        flat = dense.as_strided((dense.numel(),), (1,), dense.storage_offset())
        return _Slot(*self._put(flat.view(torch.uint8)), _Kind.of(tensor, strides))

    def _put(self, data: torch.Tensor) -> tuple[int, int, int]:
        """Add these bytes to a piece. Returns the piece's number, and their offset and size in it."""
        kind = "cpu" if data.device.type == "cpu" else "device"
        piece = max((number for number, of in enumerate(self.kinds) if of == kind), default=-1)
        if piece < 0 or self.sizes[piece] + data.numel() > _PIECE:
            piece = len(self.pieces)
            self.pieces.append([])
            self.sizes.append(0)
            self.kinds.append(kind)
        offset = self.sizes[piece]
        self.pieces[piece].append(data)
        gap = -data.numel() % _ALIGN
        if gap:
            self.pieces[piece].append(data.new_zeros(gap))
        self.sizes[piece] += data.numel() + gap
        return piece, offset, data.numel()


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


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that a sparse one consists of."""
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()  # the same sum, if it has several values for one place
        return whole.indices(), whole.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def _assembled(sparse: _Sparse, parts: list[torch.Tensor]) -> torch.Tensor:
    if sparse.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(*parts, sparse.shape, is_coalesced=True)
    return torch.sparse_compressed_tensor(*parts, sparse.shape, layout=sparse.layout)
