"""One step of several trials' optimizers at once: SGD, Adam and AdamW, each trial with its own settings.

The state of an optimizer lies beside that of the others, as the parameters do (`stack_memory`). Each optimizer keeps
its ``state_dict``: its tensors are parts of that memory. A trial's first step is its optimizer's own, which makes the
state. The equations are those of `torch.optim`, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor as T
from torch.optim import SGD, Adam, AdamW, Optimizer

from .baton import Request
from .stack_memory import Slot, Stack, part, put_rows, rows_of

#: The classes that are stepped together, and their settings that are numbers and may differ by trial and group.
NUMBERS: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("lr", "momentum", "dampening", "weight_decay"),
    Adam: ("lr", "betas", "eps", "weight_decay"),
    AdamW: ("lr", "betas", "eps", "weight_decay"),
}
#: Settings with which an optimizer steps by itself.
_NOT = ("maximize", "differentiable", "capturable", "fused")


class OptimizerSlot:
    """One trial's optimizer, which steps all parameters of one model."""

    def __init__(self, optimizer: Optimizer, slot: Slot) -> None:
        self.optimizer, self.slot = optimizer, slot

    def key(self) -> tuple[Any, ...] | None:
        """Equal for optimizers that can be stepped together now. None: this one steps by itself."""
        optimizer, of = self.optimizer, self.slot.parts.parameters
        groups = optimizer.param_groups
        placed = {id(p): number for number, p in enumerate(of)}
        columns = tuple([tuple([placed.get(id(p), -1) for p in group["params"]]) for group in groups])
        if sum(map(len, columns)) != len(of) or any(-1 in column for column in columns):
            return None
        if any(p.grad is None or p.grad.layout != torch.strided for p in of):
            return None
        key: list[Any] = [type(optimizer), columns]
        for group in groups:
            numbers = [group[name] for name in NUMBERS[type(optimizer)]]
            if any(isinstance(value, T) for value in numbers) or any(group.get(name) for name in _NOT):
                return None
            if any(isinstance(value, tuple) and any(isinstance(v, T) for v in value) for value in numbers):
                return None
            key.append(tuple(bool(group.get(name)) for name in ("momentum", "nesterov", "amsgrad", "weight_decay")))
            key.append(group.get("decoupled_weight_decay"))
        state = [optimizer.state.get(p, {}) for p in of]
        names = tuple(state[0])
        stateless = isinstance(optimizer, SGD) and not any(group["momentum"] for group in groups)
        if bool(names) == stateless or any(tuple(each) != names for each in state):
            return None  # its first step makes the state
        if any(not isinstance(value, T) for value in state[0].values()):
            return None
        return (*key, names)


class JointSteps:
    """Steps the optimizers of one stack that have a common key."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        #: By the name of an optimizer's state, all models' values: laid out as the parameters, ``step`` by parameter.
        self._states: dict[str, T] = {}
        self._owned: dict[int, dict[str, list[T]]] = {}
        self._of: T | None = None
        self._known: tuple[Any, T] | None = None

    def perform(self, requests: list[Request]) -> None:
        """`Request.data`: the `OptimizerSlot`; the result is True, or None for one that must step by itself."""
        if len(requests) < 2 or not self.stack.settled:
            return
        requests = sorted(requests, key=lambda request: request.data.slot.row)
        slots: list[OptimizerSlot] = [request.data for request in requests]
        with torch.no_grad():
            for one in slots:
                self._adopt(one)
            rows: list[int] = [one.slot.row for one in slots]  # type: ignore[misc]
            steps: list[float] = []
            if "step" in self._states:
                counts = rows_of(self._states["step"], rows).tolist()
                if any(count != counts[i][0] for i in range(len(rows)) for count in counts[i]):
                    return
                steps = [count[0] + 1 for count in counts]
            p = rows_of(self.stack.flat, rows)
            states = {name: rows_of(of_all, rows) for name, of_all in self._states.items()}
            step = _sgd if isinstance(slots[0].optimizer, SGD) else _adam
            step(p, self._gradients(slots), states, _Numbers(self, slots), slots[0].optimizer, steps)
            put_rows(self.stack.flat, rows, p)
            for name, of_all in self._states.items():
                put_rows(of_all, rows, states[name])
        changed = [tensor for one in slots for tensor in one.slot.parts.parameters]
        torch.autograd.graph.increment_version(changed)
        for request in requests:
            request.result = True

    def release(self, slot: Slot, optimizer: Optimizer) -> None:
        """Give this optimizer's state memory of its own again."""
        if self._owned.pop(id(optimizer), None) is not None:
            for p in slot.parts.parameters:
                for name, value in optimizer.state.get(p, {}).items():
                    optimizer.state[p][name] = value.detach().clone()

    def _adopt(self, one: OptimizerSlot) -> None:
        """Put this optimizer's state beside that of the others, unless it is there."""
        state, of = one.optimizer.state, one.slot.parts.parameters
        if self._of is not self.stack.flat:  # the models were put elsewhere
            self._of, self._states, self._owned = self.stack.flat, {}, {}
        owned = self._owned.get(id(one.optimizer))
        names = list(state.get(of[0], ()))
        if owned is not None and all(
            mine is state[p].get(name) for name in names for mine, p in zip(owned.get(name, ()), of, strict=True)
        ):
            return
        row: int = one.slot.row  # type: ignore[assignment]
        owned = self._owned[id(one.optimizer)] = {}
        for name in names:
            if name not in self._states:
                like = self.stack.flat
                self._states[name] = (
                    torch.zeros(len(like), len(of), dtype=torch.float32) if name == "step" else torch.zeros_like(like)
                )
            of_all = self._states[name]
            places = of_all.unbind(1) if name == "step" else self.stack.views(of_all)
            owned[name] = []
            for p, place in zip(of, places, strict=True):
                place[row].copy_(state[p][name])
                state[p][name] = part(place[row])
                owned[name].append(state[p][name])

    def _gradients(self, slots: Sequence[OptimizerSlot]) -> T:
        """The gradients, as the parameters lie: those of a common backward pass as they are, others copied."""
        columns = self.stack.columns
        first = slots[0].slot.gradients
        if first is not None:
            flat, rows = first[0], []
            for one in slots:
                if one.slot.gradients is None or one.slot.gradients[0] is not flat:
                    break
                start = flat.data_ptr() + one.slot.gradients[1] * flat.stride(0) * flat.element_size()
                rows.append(one.slot.gradients[1])
                if any(
                    p.grad.data_ptr() != start + at.start * flat.element_size()
                    for p, at in zip(one.slot.parts.parameters, columns, strict=True)
                ):
                    break
            else:
                return rows_of(flat, rows)
        flat = self.stack.flat.new_empty(len(slots), self.stack.flat.shape[1])
        into = [place[i] for i in range(len(slots)) for place in self.stack.views(flat)]
        grads = [p.grad for one in slots for p in one.slot.parts.parameters]
        torch._foreach_copy_(into, grads)
        return flat


class _Numbers:
    """A setting of all optimizers as a tensor, (optimizers, 1), or by column where there are several groups."""

    def __init__(self, steps: JointSteps, slots: Sequence[OptimizerSlot]) -> None:
        self._groups = [one.optimizer.param_groups for one in slots]
        self._flat = steps.stack.flat
        columns = steps.stack.columns
        order = {id(p): at for p, at in zip(slots[0].slot.parts.parameters, columns, strict=True)}
        self._columns = [[order[id(p)] for p in group["params"]] for group in self._groups[0]]

    def __call__(self, value: Any) -> T:
        """``value(group, i)`` of each group of each optimizer, where i is the number of the optimizer."""
        by_group = [[value(group, i) for group in groups] for i, groups in enumerate(self._groups)]
        made = torch.tensor(by_group, dtype=self._flat.dtype, device=self._flat.device)
        if len(self._columns) == 1:
            return made
        wide = made.new_empty(len(by_group), self._flat.shape[1])
        for number, columns in enumerate(self._columns):
            for at in columns:
                wide[:, at] = made[:, number : number + 1]
        return wide

    def any(self, name: str) -> bool:
        return any(group[name] for groups in self._groups for group in groups)


def _sgd(p: T, grad: T, states: dict[str, T], numbers: _Numbers, first: Optimizer, steps: list[float]) -> None:
    if numbers.any("weight_decay"):
        grad = torch.addcmul(grad, p, numbers(lambda group, i: group["weight_decay"]))
    if "momentum_buffer" in states:
        momentum = numbers(lambda group, i: group["momentum"])
        buffer = states["momentum_buffer"].mul_(momentum)
        buffer.addcmul_(grad, numbers(lambda group, i: 1 - group["dampening"]))
        grad = torch.addcmul(grad, buffer, momentum) if first.param_groups[0]["nesterov"] else buffer
    p.addcmul_(grad, numbers(lambda group, i: -group["lr"]))


def _adam(p: T, grad: T, states: dict[str, T], numbers: _Numbers, first: Optimizer, steps: list[float]) -> None:
    states["step"] += 1
    if numbers.any("weight_decay"):
        if isinstance(first, AdamW) or first.param_groups[0].get("decoupled_weight_decay"):
            p.mul_(numbers(lambda group, i: 1 - group["lr"] * group["weight_decay"]))
        else:
            grad = torch.addcmul(grad, p, numbers(lambda group, i: group["weight_decay"]))
    mean, square = states["exp_avg"], states["exp_avg_sq"]
    mean.lerp_(grad, numbers(lambda group, i: 1 - group["betas"][0]))
    square.mul_(numbers(lambda group, i: group["betas"][1]))
    square.addcmul_(grad * grad, numbers(lambda group, i: 1 - group["betas"][1]))
    root = square
    if "max_exp_avg_sq" in states:
        root = torch.maximum(states["max_exp_avg_sq"], square, out=states["max_exp_avg_sq"])
    below = root.sqrt().div_(numbers(lambda group, i: (1 - group["betas"][1] ** steps[i]) ** 0.5))
    below.add_(numbers(lambda group, i: group["eps"]))
    p.addcmul_(mean / below, numbers(lambda group, i: -group["lr"] / (1 - group["betas"][0] ** steps[i])))
