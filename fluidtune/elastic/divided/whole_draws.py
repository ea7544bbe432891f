"""What a forward draws is drawn for the whole batch, and a part's share of it is cut out.

So the masks of a part are those that the whole batch would have, and the stream goes on as alone, wherever the batch is
cut. All workers of a call begin with the leader's state of the generator. A part that draws otherwise, as a kernel that
draws inside or a permutation, is an error of the part, and the call stays whole.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fluidtune.device_kinds import on_accelerator

from .tensor_link import compact
from .torch_private import arguments_of

_aten = torch.ops.aten


@functools.cache
def _way(func: Any) -> str | int | None:
    """How an operation draws: it "fills" its tensor, or makes one "like" it, each element by itself; or one of a size,
    which is the argument of this number. None: otherwise, or not at all.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    names, tensors = arguments_of(func)
    if tensors == ["self"]:
        name = func.overloadpacket.__name__
        return "fills" if name.endswith("_") else "like" if name.endswith("_like") else None
    return names.index("size") if "size" in names and not tensors else None


class Uncut(Exception):
    """A part draws what is not known to be its share of what the batch draws."""


def _streams(args: Any) -> list[torch.Tensor]:
    cards = {each.device for each in args if isinstance(each, torch.Tensor) and on_accelerator(each)}
    return [torch.get_rng_state(), *(torch.get_device_module(card).get_rng_state(card) for card in cards)]


class WholeDraws(TorchDispatchMode):
    """``whole``: samples of the batch. ``at``, ``size``: this part's first one, and how many it has.

    ``dim``: the dimension along which the batch is cut, where a tensor has it.
    """

    def __init__(self, whole: int, at: int, size: int, dim: int) -> None:
        super().__init__()
        self._whole, self._at, self._size, self._dim = whole, at, size, dim

    def _cut(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int, int] | None:
        """Of a draw of this shape: that of the whole batch, and where this part is in it; None: it is not of samples.

        A dimension may have several numbers a sample, as heads of attention have. The check tells whether the right
        dimension is meant.
        """
        for dim in sorted(range(len(shape)), key=lambda d: (d != self._dim, d)):
            if shape[dim] and shape[dim] % self._size == 0:
                each = shape[dim] // self._size
                return (*shape[:dim], each * self._whole, *shape[dim + 1 :]), dim, each * self._at, shape[dim]
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.native_dropout.default and args[2] and 0 < args[1] < 1:
            x, p = args[0], args[1]
            mask = self._filled(_aten.bernoulli_.float, x, (1 - p,), {})
            return x * mask / (1 - p), mask.bool()
        way = _way(func)
        if way == "fills":
            return args[0].copy_(self._filled(func, args[0], args[1:], kwargs))
        if way is not None:
            place = 0 if way == "like" else int(way)
            cut = self._cut(tuple(args[0].shape if way == "like" else args[place]))
            if cut is None:
                return func(*args, **kwargs)
            whole = _empty(args[0], cut[0]) if way == "like" else list(cut[0])
            return func(*args[:place], whole, *args[place + 1 :], **kwargs).narrow(*cut[1:]).clone()
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = _streams(args)
        found = func(*args, **kwargs)
        if not all(map(torch.equal, before, _streams(args))):
            raise Uncut(f"its draws by {func} cannot be cut into parts of the batch")
        return found

    def _filled(self, func: Any, like: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """What ``func`` fills a tensor of this part with. (Each number is drawn in the order of memory.)"""
        cut = self._cut(tuple(like.shape))
        if cut is None:
            return func(torch.empty_like(like), *args, **kwargs)
        return func(_empty(like, cut[0]), *args, **kwargs).narrow(*cut[1:])


def _empty(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this shape whose dimensions lie in memory as those of ``like``."""
    return torch.empty_strided(shape, compact(shape, like.stride()), dtype=like.dtype, device=like.device)
