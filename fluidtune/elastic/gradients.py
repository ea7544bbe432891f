"""Gradients of the whole batch: at the end of every backward pass, all workers' gradients are summed.

Each worker has the gradient of the mean loss of its share. It is weighted by the share of the batch's samples, so that
the sum is the gradient of the batch's mean loss. The sum is there before ``backward()`` returns: clipping and gradient
scaling see what one worker would see. Earlier gradients that were not zeroed (accumulation) are equal on all workers;
because the weights sum to 1, the sum leaves them unchanged. At width 1 nothing happens.

An optimizer that calls a closure gets the loss of the whole batch from it. So one that decides by the loss, as LBFGS
does, decides the same on all workers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .errors import CannotDivide
from .group_view import GroupView

#: Bytes of gradients in one allreduce. Judgement: large enough that the time of a message does not count, and the most
#: memory that reducing takes at a time.
_BUCKET = 32 * 2**20


#: Why such a loop has one worker.
CAPTURED = "the loop captures a backward pass in a CUDA graph, which cannot sum gradients when it runs again"


class GradientReducer:
    """Reduces the gradients of the modules and parameters that it was given."""

    def __init__(self, group: GroupView) -> None:
        self._group = group
        self.parameters: list[torch.Tensor] = []
        self._unfinished: set[int] = set()  # parameters that have gradients which no step has taken
        self._known: set[int] = set()
        #: A backward pass is part of a CUDA graph. When the graph runs again, nothing of ours is called.
        self.captured = False
        self._passes: set[int] = set()  # backward passes at whose end a reduction waits
        self._weight = 0.0  # of this worker's gradients in the last reduction

    def add(self, module: torch.nn.Module) -> None:
        """Watch a module's parameters, including frozen ones. TypeError for lazy and sparse ones."""
        self._group.batches.watch(module)
        for name, part in module.named_modules():
            if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
                raise TypeError(f"{name or type(part).__name__} has sparse gradients: build it with sparse=False")
        for name, parameter in module.named_parameters():
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise TypeError(
                    f"parameter {name} has no shape yet: run one batch through the lazy module before elastic.prepare()"
                )
            self.watch(parameter)

    def watch(self, parameter: torch.Tensor) -> bool:
        """Watch one parameter; False if it is watched already."""
        if id(parameter) in self._known:
            return False
        self._known.add(id(parameter))
        self.parameters.append(parameter)
        frozen = not parameter.requires_grad
        parameter.requires_grad_(True)  # a hook can only be put on one that is not frozen, and stays
        parameter.register_post_accumulate_grad_hook(self._on_gradient)
        parameter.requires_grad_(not frozen)
        return True

    def watch_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Note with every step of this optimizer which gradients it has taken, and give it the whole batch's loss."""
        self._group.batches.left_out.learns = True

        def stepping(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
            if closure is None or self._group.width == 1:
                return None
            others = {name: value for name, value in kwargs.items() if name != "closure"}
            return (args[0], partial(self._loss_of_batch, closure)), others

        def stepped(*_: Any) -> None:
            self._unfinished.difference_update(id(p) for group in optimizer.param_groups for p in group["params"])

        optimizer.register_step_pre_hook(stepping)
        optimizer.register_step_post_hook(stepped)

    def _loss_of_batch(self, closure: Callable[[], Any]) -> Any:
        """What a step's closure returns, as the mean over the batch that its gradients are of."""
        self._weight = 1.0 / self._group.width  # if the closure computes no gradients
        loss = closure()
        if loss is None:
            return None
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        own = value * self._weight if self._weight else 0.0  # a stand-in's need not be finite
        whole = self._group.backend.exchange(torch.tensor([own], dtype=torch.float64), "the loss of a closure").sum()
        return whole.to(loss) if isinstance(loss, torch.Tensor) else float(whole)

    def view(self) -> list[tuple[bool, torch.Tensor | None]]:
        """For each parameter: whether it learns, and its gradient if that is being accumulated."""
        return [(p.requires_grad, p.grad if id(p) in self._unfinished else None) for p in self.parameters]

    def load(self, view: list[tuple[bool, torch.Tensor | None]]) -> None:
        """Put back what `view` returned in this worker or another one."""
        for parameter, (learns, gradient) in zip(self.parameters, view, strict=True):
            parameter.requires_grad_(learns)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
            if gradient is not None:
                self._unfinished.add(id(parameter))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if is_captured(parameter):
            self.captured = True
            if self._group.width > 1:
                raise CannotDivide(CAPTURED)
        self._unfinished.add(id(parameter))
        if self._group.width == 1:
            return
        current = backward_pass()
        if current not in self._passes:
            self._passes.add(current)
            at_end_of_backward(lambda: self._finish(current))

    def _finish(self, current: int) -> None:
        # A pass that failed never comes here. Its number is not used again, and must not stay in the set.
        self._passes = {later for later in self._passes if later > current}
        self.reduce()

    def reduce(self) -> None:
        """Sum all gradients over the workers, weighted. A gradient that no worker has stays None.

        Raises:
            CannotDivide: see `attribution`.
        """
        share = self._group.batches.gradients.use()
        weight = self._weight = 1.0 / self._group.width if share is None else share.weight
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in self.parameters:
            if parameter.requires_grad:  # the same on all workers: they run the same code
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for parameters in kinds.values():
            bucket: list[torch.Tensor] = []
            size = 0
            for parameter in parameters:
                bucket.append(parameter)
                size += parameter.numel() * parameter.element_size()
                if size >= _BUCKET:
                    self._reduce_bucket(bucket, weight)
                    bucket, size = [], 0
            if bucket:
                self._reduce_bucket(bucket, weight)

    @torch.no_grad()
    def _reduce_bucket(self, parameters: list[torch.Tensor], weight: float) -> None:
        """Reduce these parameters in one buffer, with one number for each: how many workers have its gradient."""
        sizes = [parameter.numel() for parameter in parameters]
        buffer = parameters[0].new_zeros(sum(sizes) + len(parameters))
        *slots, present = buffer.split([*sizes, len(parameters)])
        for i, (parameter, slot) in enumerate(zip(parameters, slots, strict=True)):
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                raise TypeError("a gradient is sparse: FluidTune divides batches only for dense gradients")
            present[i] = 1
            if weight:  # a stand-in's gradient does not count, even if it is not finite
                torch.mul(parameter.grad.reshape(-1), weight, out=slot)
        self._group.backend.allreduce_(buffer)
        for parameter, slot, count in zip(parameters, slots, present.tolist(), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(slot.view_as(parameter))
            elif count:
                parameter.grad = slot.view_as(parameter).clone()


def is_captured(parameter: torch.Tensor) -> bool:
    """Whether what happens to this parameter now becomes part of a CUDA graph."""
    return parameter.is_cuda and torch.cuda.is_current_stream_capturing()


# The two private calls into autograd, which FSDP uses as well; tests/elastic/test_gradients.py fails if
# they change.


def backward_pass() -> int:
    """The number of the backward pass that runs in this thread, higher for a later pass; -1: none runs."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(call: object) -> None:
    """Call ``call`` at the end of the running backward pass, before ``backward()`` returns; it may raise."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
