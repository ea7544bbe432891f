"""Where the inputs of a call are cut, and how the outputs of its parts are joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .tensor_link import compact
from .trees import Tree, same_but_tensors

#: How an output of all parts is made: the dimension along which they are joined; `SAME`: each part has it.
SAME = -1


@dataclass(frozen=True)
class Rule:
    """How calls of one structure are divided, once that was checked.

    ``cut``: by input tensor, the dimension along which it is cut; None: each part gets it whole. ``join``: by output
    tensor, see `SAME`. ``draws``, ``statistics``: the forward draws random numbers; it normalises by the batch.
    """

    cut: tuple[int | None, ...]
    join: tuple[int, ...] = ()
    draws: bool = False
    statistics: bool = False

    @property
    def dim(self) -> int:
        """The dimension of samples."""
        return next((dim for dim in self.cut if dim is not None), 0)

    def samples(self, call: Tree) -> int | None:
        """How many samples a call has; None: it does not fit the rule."""
        counts = {tensor.shape[dim] for tensor, dim in zip(call.tensors, self.cut, strict=True) if dim is not None}
        return counts.pop() if len(counts) == 1 else None

    def shapes(self, call: Tree) -> tuple[Any, ...]:
        """The shapes of a call's tensors but for the batch."""
        return tuple(
            tuple(-1 if dim == place else size for place, size in enumerate(tensor.shape))
            for tensor, dim in zip(call.tensors, self.cut, strict=True)
        )


def candidates(call: Tree) -> Iterator[Rule]:
    """Rules that may hold for calls of this structure, the likeliest first; none is checked.

    Along the first dimension, then the second one (recurrent nets).
    """
    for dim in (0, 1):
        count = next((tensor.shape[dim] for tensor in call.tensors if tensor.dim() > dim), 0)
        if count > 1:
            yield Rule(tuple(dim if t.dim() > dim and t.shape[dim] == count else None for t in call.tensors))


def sizes_of(samples: int, shares: Sequence[float]) -> list[int]:
    """How many samples each part has, in proportion to these shares: at least one each."""
    total = sum(shares)
    exact = [samples * share / total for share in shares]
    found = [max(1, int(each)) for each in exact]
    while sum(found) > samples:
        found[found.index(max(found))] -= 1
    by_rest = sorted(range(len(shares)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in range(samples - sum(found)):
        found[by_rest[i % len(shares)]] += 1
    return found


def parts_of(call: Tree, rule: Rule, sizes: Sequence[int]) -> list[Tree]:
    """What each part of the call is given."""
    pieces = [
        [tensor] * len(sizes) if dim is None else tensor.split(list(sizes), dim)
        for tensor, dim in zip(call.tensors, rule.cut, strict=True)
    ]
    return [replace(call, tensors=tuple(piece[part] for piece in pieces)) for part in range(len(sizes))]


def join_rule(whole: Tree, parts: Sequence[Tree], rule: Rule) -> Rule | str:
    """The rule, with how outputs are joined; or why they cannot be. (Values are compared by whoever asks.)"""
    if not all(same_but_tensors(part, whole) for part in parts):
        return "what it returns besides tensors depends on the batch"
    join = []
    for place, tensor in enumerate(whole.tensors):
        shapes = [part.tensors[place].shape for part in parts]
        if all(shape == tensor.shape for shape in shapes):
            join.append(SAME)
            continue
        if any(len(shape) != tensor.dim() for shape in shapes):
            return f"output {place} has another number of dimensions for a part of the batch"
        dims = [
            dim
            for dim in range(tensor.dim())
            if sum(shape[dim] for shape in shapes) == tensor.shape[dim]
            and all(
                (*shape[:dim], *shape[dim + 1 :]) == (*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for shape in shapes
            )
        ]
        if not dims:
            return f"output {place} of the parts does not add up to that of the batch"
        join.append(dims[0])
    return replace(rule, join=tuple(join))


class Outputs:
    """The outputs of all parts. ``parts``: of each, its value as bytes and tensors."""

    def __init__(self, parts: Sequence[Tree], rule: Rule) -> None:
        self._parts, self._rule = parts, rule

    def fit(self) -> bool:
        """Whether they are alike, so that they can be joined as the rule says."""
        first = self._parts[0]
        if not all(same_but_tensors(part, first) for part in self._parts[1:]):
            return False
        for place, dim in enumerate(self._rule.join):
            ours = [part.tensors[place] for part in self._parts]
            if dim == SAME:
                if not all(torch.equal(ours[0], other) for other in ours[1:]) and not ours[0].isnan().any():
                    return False
            else:
                rests = {(*t.shape[:dim], *t.shape[dim + 1 :]) for t in ours}
                if len(rests) > 1:
                    return False
        return True

    def joined(self) -> list[torch.Tensor]:
        """The tensors of the whole output."""
        return [
            self._parts[0].tensors[place].detach().clone()
            if dim == SAME
            else _cat([part.tensors[place].detach() for part in self._parts], dim)
            for place, dim in enumerate(self._rule.join)
        ]

    def value(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the call returns, with these tensors of `joined`."""
        return self._parts[0].value(tensors)

    def split(self, grads: Sequence[torch.Tensor | None]) -> list[list[torch.Tensor | None]]:
        """By part, the gradients of its tensors; ``grads``: of those of `joined`."""
        cut: list[list[torch.Tensor | None]] = [[] for _ in self._parts]
        for place, (dim, grad) in enumerate(zip(self._rule.join, grads, strict=True)):
            if grad is None or dim == SAME:  # what each part has counts once
                pieces = [grad, *[None] * (len(self._parts) - 1)]
            else:
                pieces = list(grad.split([part.tensors[place].shape[dim] for part in self._parts], dim))
            for own, piece in zip(cut, pieces, strict=True):
                own.append(piece)
        return cut


def joined_gradients(
    rule: Rule, needs: Sequence[int], pieces: Sequence[Tree], parts: Sequence[Sequence[torch.Tensor | None]]
) -> list[torch.Tensor | None]:
    """Those of the inputs ``needs``, then of the weights, from those of the parts. ``pieces``: what each was given."""
    found: list[torch.Tensor | None] = []
    for place, grads in enumerate(zip(*parts, strict=True)):
        dim = rule.cut[needs[place]] if place < len(needs) else None
        there = [grad for grad in grads if grad is not None]
        if not there:
            found.append(None)
        elif dim is None:
            found.append(sum(there[1:], start=there[0]))
        else:
            given = [piece.tensors[needs[place]] for piece in pieces]
            cut = [torch.zeros_like(t) if grad is None else grad for grad, t in zip(grads, given, strict=True)]
            found.append(torch.cat(cut, dim))
    return found


def _cat(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The tensors joined. The whole lies in memory in the order of the first one: loops view it, and draw alike."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    strides = compact(shape, torch.empty_like(tensors[0], device="meta").stride())
    out = torch.empty_strided(shape, strides, dtype=tensors[0].dtype, device=tensors[0].device)
    return torch.cat(list(tensors), dim, out=out)
