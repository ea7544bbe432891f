"""What a forward draws is drawn for the whole batch, and a part's share of it is cut out.

So the masks of a part are those that the whole batch would have, and the stream goes on as alone, wherever the batch is
cut. All workers of a call begin with the leader's state of the generator. A part that draws otherwise, as a kernel that
draws inside or a permutation, is an error of the part, and the call stays whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .tensor_link import compact

_aten = torch.ops.aten
#: They fill their first argument, each element by itself.
_FILLING = {
    _aten.bernoulli_.float,
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.exponential_.default,
    _aten.cauchy_.default,
    _aten.log_normal_.default,
    _aten.geometric_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
}
#: They make a tensor like their first argument.
_ALIKE = {
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
}
#: They make a tensor of a size -> which argument that is.
_SIZED = {
    _aten.rand.default: 0,
    _aten.randn.default: 0,
    _aten.randint.default: 1,
    _aten.randint.low: 2,
}


class Uncut(Exception):
    """A part draws what is not known to be its share of what the batch draws."""


def _streams(args: Any) -> list[torch.Tensor]:
    cards = {each.device for each in args if isinstance(each, torch.Tensor) and each.is_cuda}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(card) for card in cards)]


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
        if func in _FILLING:
            return args[0].copy_(self._filled(func, args[0], args[1:], kwargs))
        if func in _ALIKE:
            cut = self._cut(tuple(args[0].shape))
            if cut is not None:
                like = _empty(args[0], cut[0])
                return func(like, *args[1:], **kwargs).narrow(*cut[1:]).clone()
        if func in _SIZED:
            place = _SIZED[func]
            cut = self._cut(tuple(args[place]))
            if cut is not None:
                whole = (*args[:place], list(cut[0]), *args[place + 1 :])
                return func(*whole, **kwargs).narrow(*cut[1:]).clone()
        if func in _ALIKE or func in _SIZED or torch.Tag.nondeterministic_seeded not in func.tags:
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
