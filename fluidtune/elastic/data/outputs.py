"""Whether modules return the same for an evaluation's first batch in all workers, which all compute it whole.

A loop may evaluate a module that it has not prepared, such as an average of weights: a new worker has another one. The
weights that are prepared do not show that, and no gradient does. So the first evaluations over a prepared DataLoader
after a growth, and later ones as often as `common_batches.compares` says, begin with a batch that all workers have
whole. Meanwhile some numbers are noted of what each module returns, and the leader's are compared with the others'. If
they differ, the rest of the turn is computed whole, and the leader, whose samples alone count, goes on alone. A pass
whose first batch is not counted by `elastic.samples`, as that of ``update_bn`` is not, is whole to its end then.

What the loop makes of a batch without a module is not seen.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .batches import tensors_in
from .precision import spacing_of_float32

#: Calls of modules that are noted, not counting those of modules inside them.
_CALLS = 8


class Outputs:
    """Notes what modules return, from `watch` to `stop`, by hooks of torch that touch no module."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._inside: torch.nn.Module | None = None
        #: By call: the type of the module, the size of what it returned, a sum that depends on the order, and rounding.
        self._noted: list[tuple[str, float, float, float]] = []

    @property
    def watched(self) -> bool:
        return bool(self._hooks)

    def watch(self) -> None:
        self.stop()
        self._noted, self._inside = [], None
        self._hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def row(self) -> torch.Tensor:
        """What was noted, three numbers a call; those of calls that were not made are 0."""
        row = torch.zeros(_CALLS * 3, dtype=torch.float64)
        numbers = [number for _, *call in self._noted for number in call]
        row[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        return row

    def apart(self, rows: torch.Tensor) -> str | None:
        """The type of the module that did not return in each worker what it did in the leader; None: all did.

        ``rows``: what `row` returned, by rank. A call that only one of them has made is passed over: the leader alone
        makes those that are under `is_leader`.
        """
        calls = rows.view(len(rows), _CALLS, 3)
        for i, (size, turned, eps) in enumerate(calls[0].tolist()):
            others = calls[1:, i][calls[1:, i, 0] != 0]
            if size and math.isfinite(size) and len(others):
                off = (others[:, :2] - torch.tensor([size, turned], dtype=torch.float64)).abs().max()
                if not off <= math.sqrt(eps) * size:  # half of the digits agree, as in `Precision.tolerance`
                    return self._noted[i][0] if i < len(self._noted) else "a module"
        return None

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if self._inside is None and not torch.compiler.is_compiling():
            self._inside = module

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if module is not self._inside or torch.compiler.is_compiling():
            return
        self._inside = None
        if len(self._noted) >= _CALLS:
            return
        size = turned = eps = 0.0
        for tensor in tensors_in(output):
            if tensor.is_floating_point() and tensor.layout == torch.strided and tensor.numel():
                flat = tensor.detach().reshape(-1).double()
                turns = torch.arange(len(flat), device=flat.device, dtype=flat.dtype).cos()
                size, turned = size + float(flat.abs().sum()), turned + float((flat * turns).sum())
                eps = max(eps, torch.finfo(tensor.dtype).eps, spacing_of_float32(tensor.device))
        self._noted.append((type(module).__name__, size, turned, eps))
