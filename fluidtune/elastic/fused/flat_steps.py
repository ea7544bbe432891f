"""The step of one trial's optimizer over all of its parameters at once: SGD, Adam and AdamW.

The parameters of a fused trial lie in one row of memory (`stack_memory`), and the gradients of a common backward pass
in another. So a step is a few operations on rows instead of as many for each parameter. It needs nothing of the other
trials, and waits for none of them. The state lies in rows, too; the ``state_dict`` of the optimizer keeps its tensors,
which are parts of these. The first step is the optimizer's own, which makes the state. The equations are those of
`torch.optim` (``_single_tensor_adam``, ``_single_tensor_sgd``) in the same order, so that the numbers are the same.

All that can fail is done before anything is changed: what is changed needs no new memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import is_
from typing import Any

import torch
from torch import Tensor as T
from torch.optim import SGD, Adam, AdamW, Optimizer

from .stack_memory import Slot, Stack, part

#: The classes whose steps are done here, and their settings that are numbers.
NUMBERS: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("lr", "momentum", "dampening", "weight_decay"),
    Adam: ("lr", "betas", "eps", "weight_decay"),
    AdamW: ("lr", "betas", "eps", "weight_decay"),
}
#: The state of a parameter that has none.
_EMPTY: dict[str, Any] = {}
#: Settings with which an optimizer steps by itself.
_NOT = ("maximize", "differentiable", "capturable", "fused")


@dataclass(frozen=True)
class _Run:
    """Neighbouring numbers of the row that have the same settings. ``spare``: two rows of numbers of no meaning."""

    group: dict[str, Any]
    at: slice
    p: T
    states: dict[str, T]
    spare: tuple[T, T]


class FlatStep:
    """One trial's optimizer, which steps all parameters of one model."""

    def __init__(self, optimizer: Optimizer, slot: Slot) -> None:
        self.optimizer, self.slot = optimizer, slot
        self._math = _sgd if isinstance(optimizer, SGD) else _adam
        #: By parameter: its state, and the names and tensors in it that lie in `_memory`.
        self._held: list[tuple[Any, tuple[str, ...], list[T]]] = []
        #: By name, all parameters' values of the state in a row, and two spare rows.
        self._memory: dict[str, T] = {}
        self._spare: T = torch.empty(0)
        #: The number of steps that each parameter has made.
        self._counts: T | None = None
        self._groups: list[tuple[dict[str, Any], list[Any]]] = []
        self._of: tuple[T, int] | None = None
        self._runs: list[_Run] = []
        self._ends = list(accumulate(p.numel() for p in slot.parts.parameters))
        self._places: list[slice] = [
            slice(end - p.numel(), end) for end, p in zip(self._ends, slot.parts.parameters, strict=True)
        ]
        self._into: list[T] = []

    def step(self) -> bool:
        """Whether the step is done. If not, or if this raises, nothing has changed: the optimizer steps by itself."""
        stack = self.slot.stack
        if stack is None or self.slot.row is None:
            return False
        if not all(map(self._plain, self.optimizer.param_groups)) or not self._ready(stack, self.slot.row):
            return False
        with torch.no_grad():
            grad = self._gradient()
            if grad is None:
                return False
            made = 0.0
            if self._counts is not None:
                counts = self._counts.tolist()
                if any(count != counts[0] for count in counts):
                    return False
                made = counts[0] + 1
            work: list[Callable[[], None]] = []
            for run in self._runs:
                of = grad if len(self._runs) == 1 else grad[run.at]
                work.append(self._math(run, of, made, self.optimizer))
            if self._counts is not None:
                self._counts += 1
            for change in work:
                change()
        torch.autograd.graph.increment_version(self.slot.parts.parameters)
        return True

    def _plain(self, group: dict[str, Any]) -> bool:
        """Whether it has no setting with which an optimizer steps by itself, and no tensor for a number."""
        for name in NUMBERS[type(self.optimizer)]:
            value = group[name]
            if not all(isinstance(each, int | float) for each in (value if name == "betas" else (value,))):
                return False
        return not any(group.get(name) for name in _NOT)

    def _ready(self, stack: Stack, row: int) -> bool:
        """Whether the state lies in rows, after it has been put there if it can be."""
        state = self.optimizer.state
        stands = len(self._groups) == len(self.optimizer.param_groups) and all(
            known is group and len(params) == len(group["params"]) and all(map(is_, params, group["params"]))
            for (known, params), group in zip(self._groups, self.optimizer.param_groups, strict=True)
        )
        stands = stands and all(
            state.get(p, _EMPTY) is held and tuple(held) == names and all(map(is_, held.values(), mine))
            for p, (held, names, mine) in zip(self.slot.parts.parameters, self._held, strict=True)
        )
        if not stands:
            self._of, self._groups, self._held = None, [], []
            if not self._adopt():
                return False
        if self._of is None or self._of[0] is not stack.flat or self._of[1] != row:
            self._lay_runs(stack, row)
        return True

    def _adopt(self) -> bool:
        """Put the state into rows."""
        state, of, groups = self.optimizer.state, self.slot.parts.parameters, self.optimizer.param_groups
        if sorted(id(p) for group in groups for p in group["params"]) != sorted(map(id, of)):
            return False
        names = tuple(state.get(of[0], ()))
        stateless = isinstance(self.optimizer, SGD) and not any(group["momentum"] for group in groups)
        if bool(names) == stateless:
            return False  # its first step makes the state
        for p in of:
            values = state.get(p, {})
            if tuple(values) != names or not all(
                isinstance(value, T)
                and (value.numel() == 1 if name == "step" else (value.shape, value.dtype) == (p.shape, p.dtype))
                for name, value in values.items()
            ):
                return False
        like, size = of[0], self._ends[-1]
        self._memory = {name: like.new_empty(size) for name in names if name != "step"}
        self._spare = like.new_empty(2, size)
        self._into = [self._spare[0, at].view(p.shape) for p, at in zip(of, self._places, strict=True)]
        self._counts = torch.empty(len(of), dtype=torch.float32) if "step" in names else None
        for number, (p, at) in enumerate(zip(of, self._places, strict=True)):
            values = state.get(p, _EMPTY)
            mine = []
            for name in names:
                if name == "step":
                    assert self._counts is not None
                    place = self._counts[number]
                else:
                    place = self._memory[name][at].view(p.shape)
                place.copy_(values[name])
                mine.append(part(place))
            self._held.append((values, names, mine))
        for values, _, mine in self._held:
            for name, value in zip(names, mine, strict=True):
                values[name] = value
        self._groups = [(group, list(group["params"])) for group in groups]
        return True

    def _lay_runs(self, stack: Stack, row: int) -> None:
        place = {id(p): at for p, at in zip(self.slot.parts.parameters, self._places, strict=True)}
        owner = sorted(
            ((place[id(p)].start, place[id(p)].stop, i) for i, (_, params) in enumerate(self._groups) for p in params)
        )
        merged: list[tuple[int, int, int]] = []
        for start, stop, group in owner:
            if merged and merged[-1][2] == group:
                merged[-1] = (merged[-1][0], stop, group)
            else:
                merged.append((start, stop, group))
        own = stack.flat[row]
        self._runs = [
            _Run(
                self._groups[group][0],
                slice(start, stop),
                own[start:stop],
                {name: of_all[start:stop] for name, of_all in self._memory.items()},
                (self._spare[0, start:stop], self._spare[1, start:stop]),
            )
            for start, stop, group in merged
        ]
        self._of = stack.flat, row

    def _gradient(self) -> T | None:
        """The gradients in a row: those of a common backward pass as they are, others copied. None: one is missing."""
        grads = [p.grad for p in self.slot.parts.parameters]
        if any(
            grad is None or grad.layout != torch.strided or p.data_ptr() != pointer
            for p, grad, pointer in zip(self.slot.parts.parameters, grads, self.slot.pointers, strict=False)
        ):
            return None
        given = self.slot.gradients
        if given is not None:
            row = given[0][given[1]]
            start, size = row.data_ptr(), row.element_size()
            if all(
                grad.data_ptr() == start + at.start * size and grad.is_contiguous()  # type: ignore[union-attr]
                for grad, at in zip(grads, self._places, strict=True)
            ):
                return row
        torch._foreach_copy_(self._into, grads)
        return self._spare[0]


def _sgd(run: _Run, grad: T, made: float, optimizer: Optimizer) -> Callable[[], None]:
    rate, momentum, decay = (float(run.group[name]) for name in ("lr", "momentum", "weight_decay"))
    kept, nesterov = 1 - float(run.group["dampening"]), bool(run.group["nesterov"])

    def change() -> None:
        update = grad
        if decay:
            update = torch.add(update, run.p, alpha=decay, out=run.spare[0])
        if momentum:
            buffer = run.states["momentum_buffer"].mul_(momentum).add_(update, alpha=kept)
            update = torch.add(update, buffer, alpha=momentum, out=run.spare[0]) if nesterov else buffer
        run.p.add_(update, alpha=-rate)

    return change


def _adam(run: _Run, grad: T, made: float, optimizer: Optimizer) -> Callable[[], None]:
    rate, eps, decay = (float(run.group[name]) for name in ("lr", "eps", "weight_decay"))
    beta1, beta2 = map(float, run.group["betas"])
    size, root_of = rate / (1 - beta1**made), (1 - beta2**made) ** 0.5
    apart = isinstance(optimizer, AdamW) or bool(run.group.get("decoupled_weight_decay"))
    mean, square = run.states["exp_avg"], run.states["exp_avg_sq"]
    largest = run.states["max_exp_avg_sq"] if run.group["amsgrad"] else None

    def change() -> None:
        update = grad
        if decay and apart:
            run.p.mul_(1 - rate * decay)
        elif decay:
            update = torch.add(update, run.p, alpha=decay, out=run.spare[0])
        mean.lerp_(update, 1 - beta1)
        square.mul_(beta2).addcmul_(update, update, value=1 - beta2)
        root = square if largest is None else torch.maximum(largest, square, out=largest)
        below = torch.sqrt(root, out=run.spare[1]).div_(root_of).add_(eps)
        run.p.addcdiv_(mean, below, value=-size)

    return change
