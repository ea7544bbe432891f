"""Whether modules make the same of an evaluation's first batch in all workers, which all compute whole.

A loop may evaluate a module that it has not prepared, such as an average of weights: a new worker has another one. The
weights that are prepared do not show that, and no gradient does. So an evaluation over a prepared DataLoader begins
with a batch that all workers have whole, once after each growth and each later comparison (`common_batches`). Meanwhile
some numbers are noted of what each module returns, and the leader's are compared with the others'. What the loop makes
of a batch without a module is not seen.
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

    def apart(self, leaders: torch.Tensor, theirs: torch.Tensor) -> str | None:
        """The type of the module that returned something else in another worker; None: all returned the same.

        ``leaders``, ``theirs``: what `row` returned there. A call that only one of them has made is passed over: the
        leader alone makes those that are under `is_leader`.
        """
        for i, (mine, other) in enumerate(zip(leaders.view(-1, 3), theirs.view(-1, 3), strict=True)):
            size, turned, eps = mine.tolist()
            if not size or not other[0] or not math.isfinite(size):
                continue
            off = max(abs(size - float(other[0])), abs(turned - float(other[1])))
            if not off <= math.sqrt(eps) * size:
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
