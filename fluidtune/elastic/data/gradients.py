"""Gradients of the whole batch: at the end of every backward pass, all workers' gradients are summed.

Each worker has the gradient of the mean loss of its share. It is weighted by the share of the batch's samples, so that
the sum is the gradient of the batch's mean loss. The sum is there before ``backward()`` returns: clipping and gradient
scaling see what one worker would see. Earlier gradients that were not zeroed (accumulation) are equal on all workers;
because the weights sum to 1, the sum leaves them unchanged. At width 1 nothing happens.

An optimizer that calls a closure gets the loss of the whole batch from it. So one that decides by the loss, as LBFGS
does, decides the same on all workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ..errors import CannotDivide
from ..transport.trees import dense_strides
from .group_view import GroupView
from .precision import Precision

#: Bytes of gradients in one allreduce: the most memory that reducing takes at a time.
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
        self.captured = False  # a backward pass is part of a CUDA graph, which calls no hook when it runs again
        self._passes: set[int] = set()  # backward passes at whose end a reduction waits
        self._weight = 0.0  # of this worker's gradients in the last reduction
        self._names: dict[int, str] = {}  # of parameters, by id
        self._precision = Precision()

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
            self._names.setdefault(id(parameter), name)
            self.watch(parameter)

    def watch(self, parameter: torch.Tensor) -> bool:
        """Watch one parameter; False if it is watched already.

        One that cannot learn is state of the trial and nothing else: torch lets no integers learn, nor anything that
        was made in inference mode.
        """
        if id(parameter) in self._known:
            return False
        self._known.add(id(parameter))
        self.parameters.append(parameter)
        frozen = not parameter.requires_grad
        try:
            parameter.requires_grad_(True)  # a hook can only be put on one that is not frozen, and stays
        except RuntimeError:
            return True
        parameter.register_post_accumulate_grad_hook(self._on_gradient)
        parameter.requires_grad_(not frozen)
        return True

    def restart(self, wide: bool) -> None:
        """The group is a new one. ``wide``: it has several workers."""
        self._precision.end()
        if wide:
            self._precision = Precision()
            self._precision.watch()

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
            at_end_of_backward(lambda: self._reduce(current))

    def _reduce(self, current: int) -> None:
        """Sum all gradients over the workers, weighted. A gradient that no worker has stays None."""
        # A pass that failed never comes here. Its number is not used again, and must not stay in the set.
        self._passes = {later for later in self._passes if later > current}
        share = self._group.batches.gradients.use()
        weight = self._weight = 1.0 / self._group.width if share is None else share.weight
        common = share is not None and share.common
        apart: list[torch.Tensor] = []
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in self.parameters:
            if parameter.requires_grad:  # the same on all workers: they run the same code
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for bucket in (bucket for parameters in kinds.values() for bucket in _buckets(parameters)):
            if common:
                apart += self._take_leaders(bucket)
            else:
                self._reduce_bucket(bucket, weight)
        if common:
            self._compare([parameter for parameters in kinds.values() for parameter in parameters], apart)

    @torch.no_grad()
    def _take_leaders(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Give all workers the leader's gradients. Returns how far each of the own was off that no step has taken.

        One that a step has taken, or that was set to zero, counts for the next step, too: by it weights decay.
        """
        device, leads = parameters[0].device, self._group.backend.rank == 0
        buffer, places, present = _buffer_for(parameters)
        if leads:
            for i, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    places[i].copy_(parameter.grad)
                    present[i] = 2 if id(parameter) in self._unfinished else 1
        self._group.backend.broadcast_(buffer, "the gradients of a batch that all compute")
        apart = []
        for parameter, place, there in zip(parameters, places, present.tolist(), strict=True):
            own = parameter.grad if id(parameter) in self._unfinished else None
            apart.append(_distance(own, place if there == 2 else None, device))
            if leads:
                continue
            if not there:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).copy_(place)
            else:
                parameter.grad.copy_(place)
        return apart

    def _compare(self, parameters: list[torch.Tensor], apart: list[torch.Tensor]) -> None:
        """All workers: whether each had the leader's gradients, as far as rounding lets it."""
        if not parameters:
            return
        group = self._group
        largest = max(largest_of(parameter.grad) for parameter in parameters)
        found = [float(distance) for distance in apart]
        worst = max(range(len(found)), key=lambda i: math.inf if math.isnan(found[i]) else found[i])
        eps = max(torch.finfo(parameter.dtype).eps for parameter in parameters)
        allowed = self._precision.tolerance(group.backend.device, eps)
        off = found[worst] / largest if largest else found[worst]
        finite = math.isfinite(largest)
        row = torch.tensor([finite and not off <= allowed, worst, off, finite], dtype=torch.float64)
        rows = group.backend.exchange(row, "the comparison of gradients")
        other = next((rank for rank in range(len(rows)) if rows[rank, 0]), None)
        if other is not None:
            name = self._names.get(id(parameters[int(rows[other, 1])]), "a parameter")
            by = f"{float(rows[other, 2]):.2g} of the largest gradient"
            group.likeness.trains_apart(f"its gradient of {name} is off by {by}")
        elif rows[:, 3].all():  # else a scaler leaves this step out
            group.common.compared()

    @torch.no_grad()
    def _reduce_bucket(self, parameters: list[torch.Tensor], weight: float) -> None:
        """Reduce these parameters in one buffer, with one number for each: how many workers have its gradient.

        The number of operations does not depend on that of the parameters, and the host waits for none of them unless
        this worker lacks a gradient.
        """
        buffer, places, present = _buffer_for(parameters)
        gradients = [parameter.grad for parameter in parameters]
        have = [i for i, gradient in enumerate(gradients) if gradient is not None]
        filled, own = [places[i] for i in have], [gradients[i] for i in have]
        if any(gradient.layout != torch.strided for gradient in own):
            raise TypeError("a gradient is sparse: FluidTune divides batches only for dense gradients")
        if own and weight:  # a stand-in's gradient does not count, even if it is not finite
            torch._foreach_copy_(filled, own)
            buffer.mul_(weight)
        if len(have) == len(parameters):
            present.fill_(1)
        else:
            for i in have:
                present[i] = 1
        self._group.backend.allreduce_(buffer)
        if own:
            torch._foreach_copy_(own, filled)
        if len(have) < len(parameters):
            for parameter, place, count in zip(parameters, places, present.tolist(), strict=True):
                if parameter.grad is None and count:
                    parameter.grad = torch.empty_like(parameter).copy_(place)


def _buckets(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The parameters in their order, in parts of about `_BUCKET` bytes."""
    bucket: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= _BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _buffer_for(parameters: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """A buffer of zeros for these parameters' gradients, each one's place in it, and one number more for each.

    Each gradient lies in the buffer as its parameter does in memory, which is the same on all workers.
    """
    sizes = [parameter.numel() for parameter in parameters]
    buffer = parameters[0].new_zeros(sum(sizes) + len(parameters))
    *slots, present = buffer.split([*sizes, len(parameters)])
    places = [slot.as_strided(p.shape, dense_strides(p)) for p, slot in zip(parameters, slots, strict=True)]
    return buffer, places, present


def _distance(own: torch.Tensor | None, leaders: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The largest difference between two gradients; infinite where only one worker has one."""
    if own is None or leaders is None:
        return torch.tensor(0.0 if own is leaders else math.inf, device=device)
    if own.layout != torch.strided:
        raise TypeError("a gradient is sparse: FluidTune divides batches only for dense gradients")
    return (own - leaders).abs().max() if own.numel() else torch.tensor(0.0, device=device)


def largest_of(gradient: torch.Tensor | None) -> float:
    """The largest number of a gradient, without its sign; 0 where there is none."""
    return 0.0 if gradient is None or not gradient.numel() else float(gradient.abs().max())


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
