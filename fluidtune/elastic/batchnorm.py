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

from .attribution import Share
from .errors import CannotDivide
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
        if share is None:  # nothing to sum up: all workers have all samples
            return _torch_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        mean, variance, unbiased = _statistics(input, share, self._group)
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:
                running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        shape = [1, -1, *([1] * (input.dim() - 2))]
        y = (input.to(mean.dtype) - mean.view(shape)) * torch.rsqrt(variance + eps).view(shape)
        if weight is not None:
            y = y * weight.view(shape)
        if bias is not None:
            y = y + bias.view(shape)
        return y.to(input.dtype)


def _statistics(x: torch.Tensor, share: Share, group: GroupView) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, variance and unbiased variance of each channel over all workers' samples. x: (N, C) or (N, C, ...)."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [1, -1, *([1] * (x.dim() - 2))]
    counted = 0 if share.stand_in else x.numel() // x.size(1)
    local_mean = wide.mean(axes)
    local_spread = (wide - local_mean.view(shape)).square().sum(axes)
    row = torch.cat([local_mean, local_spread, wide.new_tensor([float(counted)])])
    means, spreads, counts = _Gather.apply(row, group, share.weight).split([x.size(1), x.size(1), 1], dim=1)
    total = counts.sum()
    if total <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got {tuple(x.shape)}")
    mean = (means * counts).sum(0) / total
    # Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm" (1979): the squared deviations within the
    # parts, and those between them. A stand-in does not count.
    spread = (torch.where(counts > 0, spreads, 0) + counts * (means - mean).square()).sum(0)
    return mean, spread / total, spread / (total - 1)


class _Gather(torch.autograd.Function):
    """All workers' rows, of shape (width, len(row)), with a gradient.

    Backward runs in each worker for the mean loss of its own share, and `gradients` then weights the result by the
    worker's share. The part of a gradient that comes from another worker's loss must be weighted by that worker's share
    instead: it is multiplied by that share, summed, and divided by this worker's share.

    Backward cannot be differentiated again, as a gradient penalty wants it: autograd does not see the sum.
    """

    @staticmethod
    def forward(ctx: Any, row: torch.Tensor, group: GroupView, weight: float) -> torch.Tensor:
        ctx.group, ctx.weight = group, weight
        return group.backend.gather(row, "batch statistics")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled():  # create_graph=True; all workers are here
            raise CannotDivide(
                "a gradient of a gradient goes through batch normalisation, whose statistics are of all workers' "
                "samples: give the trial one worker, or another kind of normalisation"
            )
        owed = grads[0].contiguous() * ctx.weight if ctx.weight else torch.zeros_like(grads[0])
        ctx.group.backend.allreduce_(owed, "the gradient of batch statistics")
        mine = owed[ctx.group.backend.rank]
        return (mine / ctx.weight if ctx.weight else torch.zeros_like(mine)), None, None
