"""Batch normalisation over the whole batch while its parts are computed by several processes.

A `TorchFunctionMode` takes the place of torch's two functions by which all modules and scripts normalise batches. The
leader's running statistics are those of the whole batch; a replica's do not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

#: Given a table with a row of each part, returns the row of the whole batch.
Merge = Callable[[torch.Tensor], torch.Tensor]
#: Given a part's row, returns that of the whole batch. All parts call it at the same places, forward and backward.
Gather = Callable[[torch.Tensor, Merge], torch.Tensor]


def _normalises(func: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """What batch normalisation is called with, by name, if its statistics are the batch's; None: it is another call."""
    names: tuple[str, ...] = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
    if func is torch.batch_norm:
        names = "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled"
    elif func is not F.batch_norm:
        return None
    found = {**given, **dict(zip(names, args, strict=False)), **kwargs}
    return found if found["training"] else None


class SeenStatistics(TorchFunctionMode):
    """Sees whether a call computes statistics of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or _normalises(func, args, kwargs or {}) is not None
        return func(*args, **(kwargs or {}))


class WholeStatistics(TorchFunctionMode):
    """Computes statistics over all parts. ``gather``: how the parts meet, also in the backward."""

    def __init__(self, gather: Gather) -> None:
        super().__init__()
        self._gather = gather

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = _normalises(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        x, momentum = call["input"], call["momentum"]
        running_mean, running_var = call["running_mean"], call["running_var"]
        mean, variance, count = _statistics(x, self._gather)
        with torch.no_grad():  # by ``data``: torch's own writes do not count as writes for graphs that hold them, too
            if running_mean is not None:
                running_mean.data.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:
                running_var.data.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
        return _Normalised.apply(x, call["weight"], call["bias"], mean, variance, count, call["eps"], self._gather)


class Recorded:
    """Where parts meet that one process computes one after the other: each gets what the whole batch had there."""

    def __init__(self) -> None:
        self._whole: list[torch.Tensor] = []
        self._merges: list[Merge] = []
        self._parts: list[list[torch.Tensor]] = []

    def whole(self, row: torch.Tensor, merge: Merge) -> torch.Tensor:
        """The `Gather` of the whole batch, which is computed first."""
        self._whole.append(row)
        self._merges.append(merge)
        return row

    def part(self) -> Gather:
        """The `Gather` of the next part."""
        rows: list[torch.Tensor] = []
        self._parts.append(rows)

        def gather(row: torch.Tensor, merge: Merge) -> torch.Tensor:
            rows.append(row)
            return self._whole[len(rows) - 1]

        return gather

    def agree(self, tolerance: float) -> bool:
        """Whether the parts have been at all places, and had there what the whole had. ``tolerance``: relative."""
        if any(len(rows) != len(self._whole) for rows in self._parts):
            return False
        for place, (whole, merge) in enumerate(zip(self._whole, self._merges, strict=True)):
            table = torch.stack([rows[place] for rows in self._parts])
            off = tolerance * float(table.abs().nan_to_num(0.0, 0.0).max())
            if not torch.allclose(merge(table), whole, rtol=0.0, atol=off, equal_nan=True):
                return False
        return True


@torch.no_grad()
def _statistics(x: torch.Tensor, gather: Gather) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and variance of each channel over all parts, and the count of its values. x: (N, C) or (N, C, ...)."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    variance, mean = torch.var_mean(wide, [axis for axis in range(x.dim()) if axis != 1], correction=0)
    row = torch.cat([mean, variance, wide.new_full((1,), float(x.numel() // x.size(1)))])
    mean, variance, count = gather(row, _merged).split([x.size(1), x.size(1), 1])
    return mean, variance, count[0]


def _merged(table: torch.Tensor) -> torch.Tensor:
    channels = table.size(1) // 2
    means, variances, counts = table.split([channels, channels, 1], dim=1)
    parts = counts / counts.sum()
    mean = (means * parts).sum(0)
    # Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm" (1979): the squared deviations within the
    # parts, and those between them.
    return torch.cat([mean, ((variances + (means - mean).square()) * parts).sum(0), counts.sum()[None]])


class _Normalised(torch.autograd.Function):
    """A part normalised with statistics of the whole batch, of which the gradient knows.

    The gradient: Ioffe and Szegedy, "Batch Normalization" (2015), section 3. torch computes what does not depend on the
    statistics, in one pass over the part, and what of the rest is a sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: torch.Tensor,
        eps: float,
        gather: Gather,
    ) -> torch.Tensor:
        # Of a batch in half precision torch takes all else in float32.
        scale, shift = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
        ctx.save_for_backward(x, scale, mean, variance, count)
        ctx.eps, ctx.gather = eps, gather
        ctx.types = [None if each is None else each.dtype for each in (weight, bias)]
        return torch.batch_norm(x, scale, shift, mean, variance, False, 0.0, eps, False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale, mean, variance, count = ctx.saved_tensors
        scale = torch.ones_like(mean) if scale is None else scale
        inverse = torch.rsqrt(variance + ctx.eps)
        # With the statistics as constants: the gradients of x and of the weight, and the sum of those of the output.
        of_x, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grads[0], x, scale, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        of_both = torch.stack([of_bias, of_weight])
        means = ctx.gather(of_both.flatten(), lambda table: table.sum(0)).view_as(of_both) / count
        given = [
            None if kind is None else each.to(kind) for kind, each in zip(ctx.types, (of_weight, of_bias), strict=True)
        ]
        # d loss / d x = weight * inverse * (d y - mean of d y - normalised x * mean of (d y * normalised x))
        factor = scale * inverse
        slope = -factor * inverse * means[1]
        offset = -factor * means[0] - slope * mean
        shape = [1, -1, *([1] * (x.dim() - 2))]
        wide = torch.addcmul(of_x.to(mean.dtype) + offset.view(shape), x.to(mean.dtype), slope.view(shape))
        return wide.to(x.dtype), *given, *[None] * 5
