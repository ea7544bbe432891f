"""Batch normalisation over the whole batch, however the batch is divided.

While a trial has several workers, ``torch.nn.functional.batch_norm``, which all modules call, is replaced, and
`torch.nn.SyncBatchNorm` calls it like the others. No module is touched: copies of a model, its pickle and its
``state_dict`` are those that it has alone, and a copy computes with its own weights. At width 1 torch is as it was
made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import SyncBatchNorm
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import CannotDivide
from .group_view import GroupView

_torch_batch_norm = F.batch_norm
_torch_sync_forward = SyncBatchNorm.forward


class GlobalBatchStatistics:
    """Replaces and restores batch normalisation in this process."""

    def __init__(self, group: GroupView) -> None:
        self._group = group
        self._enabled = False

    def enable(self, enabled: bool) -> None:
        """Replace torch's batch normalisation, or restore it."""
        if enabled == self._enabled:
            return
        self._enabled = enabled
        F.batch_norm = self._batch_norm if enabled else _torch_batch_norm
        SyncBatchNorm.forward = _BatchNorm.forward if enabled else _torch_sync_forward  # type: ignore[method-assign]

    def _batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """As ``torch.nn.functional.batch_norm``; with ``training``, over all workers' parts of a divided batch."""
        share = self._group.batches.statistics.use() if training else None
        if share is None or share.common:  # nothing to sum up: all workers have all samples
            return _torch_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        counted = 0 if share.stand_in else input.numel() // input.size(1)
        mean, variance, count = _statistics(input, counted, self._group)
        # Else the batch has two values: the host need not wait for their number.
        if counted <= 1 and count <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got {tuple(input.shape)}")
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:
                running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
        normalised: torch.Tensor = _Normalised.apply(
            input, weight, bias, mean, variance, count, eps, self._group, share.weight
        )
        return normalised


@torch.no_grad()
def _statistics(x: torch.Tensor, counted: int, group: GroupView) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and variance of each channel over all workers' samples, and their count. x: (N, C) or (N, C, ...).

    ``counted``: how many values of each channel are here; 0: none that count.
    """
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    variance, mean = torch.var_mean(wide, [axis for axis in range(x.dim()) if axis != 1], correction=0)
    row = torch.cat([mean, variance, wide.new_full((1,), float(counted))])
    means, variances, counts = group.backend.gather(row, "batch statistics").split([x.size(1), x.size(1), 1], dim=1)
    total = counts.sum()
    parts = counts / total
    # A stand-in does not count, even if it is not finite.
    means, variances = torch.where(counts > 0, means, 0), torch.where(counts > 0, variances, 0)
    mean = (means * parts).sum(0)
    # Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm" (1979): the squared deviations within the
    # parts, and those between them.
    return mean, ((variances + (means - mean).square()) * parts).sum(0), total


class _Normalised(torch.autograd.Function):
    """A batch normalised with statistics of all workers' samples, of which the gradient knows.

    Backward runs in each worker for the mean loss of its own share, and `gradients` then weights the result by the
    worker's share. The part of a gradient that comes from another worker's loss must be weighted by that worker's share
    instead: it is multiplied by that share, summed, and divided by this worker's share.

    The gradient of batch normalisation: Ioffe and Szegedy, "Batch Normalization" (2015), section 3. torch computes what
    does not depend on the statistics, in one pass over the batch, and what of the rest is a sum.

    Backward cannot be differentiated again, as a gradient penalty wants it: autograd does not see the sum.
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
        group: GroupView,
        share: float,
    ) -> torch.Tensor:
        # Of a batch in half precision torch takes all else in float32.
        scale, shift = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
        ctx.save_for_backward(x, scale, mean, variance, count)
        ctx.eps, ctx.group, ctx.share = eps, group, share
        ctx.types = [None if each is None else each.dtype for each in (weight, bias)]
        return _torch_batch_norm(x, mean, variance, scale, shift, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True; all workers are here
            raise CannotDivide(
                "a gradient of a gradient goes through batch normalisation, whose statistics are of all workers' "
                "samples: give the trial one worker, or another kind of normalisation"
            )
        x, scale, mean, variance, count = ctx.saved_tensors
        scale = torch.ones_like(mean) if scale is None else scale
        inverse = torch.rsqrt(variance + ctx.eps)
        # With the statistics as constants: the gradients of x and of the weight, and the sum of those of the output.
        of_x, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grads[0], x, scale, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        sums = torch.stack([of_bias, of_weight])
        owed = sums * ctx.share if ctx.share else torch.zeros_like(sums)
        ctx.group.backend.allreduce_(owed, "the gradient of batch statistics")
        given = [None if kind is None else each.to(kind) for kind, each in zip(ctx.types, sums.flip(0), strict=True)]
        if not ctx.share:
            return torch.zeros_like(x), *given, *[None] * 6
        means = owed / (ctx.share * count)
        # d loss / d x = weight * inverse * (d y - mean of d y - normalised x * mean of (d y * normalised x))
        factor = scale * inverse
        slope = -factor * inverse * means[1]
        offset = -factor * means[0] - slope * mean
        shape = [1, -1, *([1] * (x.dim() - 2))]
        wide = torch.addcmul(of_x.to(mean.dtype) + offset.view(shape), x.to(mean.dtype), slope.view(shape))
        return wide.to(x.dtype), *given, *[None] * 6
