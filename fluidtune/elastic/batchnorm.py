"""Batch normalisation over the whole batch, however the batch is divided.

While a trial has several workers, the forward method of its batch norm modules in training mode is replaced. At width 1
the modules are as torch made them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from .group_view import GroupView


class GlobalBatchStatistics:
    """Replaces and restores the forward method of the modules that it was given."""

    def __init__(self, group: GroupView) -> None:
        self._group = group
        self._modules: list[_BatchNorm] = []
        self._enabled = False

    def add(self, module: _BatchNorm) -> None:
        if any(module is known for known in self._modules):
            return
        self._modules.append(module)
        if self._enabled:
            self._replace(module)

    def enable(self, enabled: bool) -> None:
        """Replace the forward method of all modules, or restore it."""
        if enabled == self._enabled:
            return
        self._enabled = enabled
        for module in self._modules:
            if enabled:
                self._replace(module)
            else:
                del module.__dict__["forward"]

    def _replace(self, module: _BatchNorm) -> None:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if not module.training:
                return type(module).forward(module, x)
            return _forward(module, x, self._group)

        module.__dict__["forward"] = forward  # as __setattr__ does, without its search


def _forward(module: _BatchNorm, x: torch.Tensor, group: GroupView) -> torch.Tensor:
    """Training-mode batch norm over all workers' samples. x: (N, C) or (N, C, ...)."""
    module._check_input_dim(x)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [1, -1, *([1] * (x.dim() - 2))]
    share = group.batches.statistics.use()
    counted = 0 if share is not None and share.stand_in else x.numel() // x.size(1)
    weight = 1.0 / group.width if share is None else share.weight
    local_mean = wide.mean(axes)
    local_spread = (wide - local_mean.view(shape)).square().sum(axes)
    row = torch.cat([local_mean, local_spread, wide.new_tensor([float(counted)])])
    means, spreads, counts = _Gather.apply(row, group, weight).split([x.size(1), x.size(1), 1], dim=1)
    total = counts.sum()
    if total <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got {tuple(x.shape)}")
    mean = (means * counts).sum(0) / total
    # Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm" (1979): the squared deviations within the
    # parts, and those between them. A stand-in does not count.
    spread = (torch.where(counts > 0, spreads, 0) + counts * (means - mean).square()).sum(0)
    variance = spread / total
    _update_running(module, mean.detach(), (spread / (total - 1)).detach())
    y = (wide - mean.view(shape)) * torch.rsqrt(variance + module.eps).view(shape)
    if module.weight is not None:
        y = y * module.weight.view(shape)
    if module.bias is not None:
        y = y + module.bias.view(shape)
    return y.to(x.dtype)


@torch.no_grad()
def _update_running(module: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    if not module.track_running_stats or module.running_mean is None or module.running_var is None:
        return
    factor = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if factor is None:  # a cumulative average
            factor = 1.0 / float(module.num_batches_tracked)
    factor = 0.0 if factor is None else factor
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
    module.running_var.lerp_(variance.to(module.running_var.dtype), factor)


def _gather(row: torch.Tensor, group: GroupView) -> torch.Tensor:
    """All workers' rows, of shape (width, len(row)): the sum of matrices in which each worker has set its row."""
    rows = row.new_zeros(group.width, row.numel())
    rows[group.backend.rank] = row
    group.backend.allreduce_(rows)
    return rows


class _Gather(torch.autograd.Function):
    """`_gather` with a gradient.

    Backward runs in each worker for the mean loss of its own share, and `gradients` then weights the result by the
    worker's share. The part of a gradient that comes from another worker's loss must be weighted by that worker's share
    instead: it is multiplied by that share, summed, and divided by this worker's share.
    """

    @staticmethod
    def forward(ctx: Any, row: torch.Tensor, group: GroupView, weight: float) -> torch.Tensor:
        ctx.group, ctx.weight = group, weight
        return _gather(row, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        owed = grads[0].contiguous() * ctx.weight if ctx.weight else torch.zeros_like(grads[0])
        ctx.group.backend.allreduce_(owed)
        mine = owed[ctx.group.backend.rank]
        return (mine / ctx.weight if ctx.weight else torch.zeros_like(mine)), None, None
