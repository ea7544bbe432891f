"""Gradients that no optimizer has taken a step with: they are state of the trial where a loop accumulates them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Accumulated:
    """Watches the parameters that it was given."""

    def __init__(self) -> None:
        self.parameters: list[torch.Tensor] = []
        self._known: set[int] = set()
        #: By id, the parameters with gradients that no step has taken.
        self._unfinished: set[int] = set()
        # Of each optimizer: some wrap the one that was prepared, or are wrapped by it, as those of SAM and Lookahead.
        self._hooks = [register_optimizer_step_post_hook(self._on_step)]

    def close(self) -> None:
        """Watch nothing any more; idempotent. Until then torch holds this object, and so all parameters."""
        for hook in self._hooks:
            hook.remove()

    def watch(self, parameter: torch.Tensor) -> bool:
        """Watch one parameter, frozen or not; False if it is watched already."""
        if id(parameter) in self._known:
            return False
        self._known.add(id(parameter))
        self.parameters.append(parameter)
        frozen = not parameter.requires_grad
        try:
            parameter.requires_grad_(True)  # a hook can only be put on one that is not frozen, and stays
        except RuntimeError:  # integers never learn, nor what was made in inference mode
            return True
        self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))
        parameter.requires_grad_(not frozen)
        return True

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._unfinished.difference_update(id(p) for group in optimizer.param_groups for p in group["params"])

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._unfinished.add(id(parameter))

    def view(self) -> list[tuple[bool, torch.Tensor | None]]:
        """For each parameter: whether it learns, and its gradient if that is being accumulated."""
        return [(p.requires_grad, p.grad if id(p) in self._unfinished else None) for p in self.parameters]

    def load(self, view: list[tuple[bool, torch.Tensor | None]]) -> None:
        """Put back what `view` returned, in this process or another one."""
        for parameter, (learns, gradient) in zip(self.parameters, view, strict=True):
            if parameter.requires_grad != learns:
                parameter.requires_grad_(learns)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
            if gradient is None:
                self._unfinished.discard(id(parameter))
            else:
                self._unfinished.add(id(parameter))
