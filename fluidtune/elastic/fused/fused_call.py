"""One call of a model for several trials, and its backward pass.

The forward of one of the models runs with the parameters, buffers and inputs of all (`stacked_tensor`). Each trial gets
a copy of its own outputs, joined to its own autograd graph by `_Join`. The backward pass of a trial waits there for the
others', so that the gradients of all are computed at once; each trial gets its rows. A call that fails is undone: the
buffers, attributes and random streams are put back, and each trial calls its model by itself.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor as T
from torch import nn

from . import grouped_forms, layer_forms, recurrent_forms
from .baton import Request
from .dropout_masks import Draws
from .own_streams import OwnStreams, mark_of_process, put_torch_streams, torch_streams
from .stack_memory import Slot, Stack, put_rows, rows_of
from .stacked_tensor import NotFusable, Stacked, plain

#: Modules that fill the table of grouped forms when they are imported.
FORMS_OF = (grouped_forms, layer_forms, recurrent_forms)
#: Why a model is trained by itself whose forward leaves something in an attribute.
WRITES = "its forward writes to its module"
#: How far the outputs of a trial with dropout may be from those that it has alone, as a part of their size. Judgement:
#: rounding makes less of a difference, in half precision too, and a mask that is another one makes more.
SAME_MASK = 0.02


@dataclass(eq=False)
class Call:
    """One trial's call of its model: the model, and the arguments, of which the tensors are taken out."""

    slot: Slot
    streams: OwnStreams
    tensors: list[T]
    rebuild: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    #: Waits in the trial's thread for common work.
    wait: Callable[[Request], None]
    #: Trains the model by itself from now on, and says why.
    part: Callable[[str], None]

    def __post_init__(self) -> None:
        #: torch's streams before the call is done, and what else the call alone would depend on.
        self.drawn: tuple[T, T | None] = self.streams.torch, self.streams.gpu
        self.training = [module.training for module in self.slot.parts.modules]
        self.versions = [t._version for t in self.tensors], self.slot.versions()


def take_apart(value: Any, tensors: list[T]) -> tuple[Any, Callable[[list[Any]], Any]]:
    """``value`` without its tensors, hashable, and what puts it together again from other tensors.

    Raises:
        NotFusable: it is neither a tensor, nor a plain value, nor made of such.
    """
    if type(value) in (torch.Tensor, nn.Parameter):
        tensors.append(value)
        place = len(tensors) - 1
        return "tensor", lambda given: given[place]
    if isinstance(value, tuple | list):
        taken = [take_apart(item, tensors) for item in value]
        make: Any = getattr(type(value), "_make", type(value))
        return (type(value), *(key for key, _ in taken)), lambda given: make([build(given) for _, build in taken])
    if type(value) is dict:
        named = {name: take_apart(item, tensors) for name, item in value.items()}
        key = (dict, *((name, key) for name, (key, _) in named.items()))
        return key, lambda given: {name: build(given) for name, (_, build) in named.items()}
    if isinstance(value, int | float | bool | str | type(None) | torch.dtype | torch.device):
        return (type(value), value), lambda given: value
    raise NotFusable(f"it is called with, or returns, a {type(value).__name__}")


def signature(tensors: list[T]) -> tuple[Any, ...]:
    """What must be equal for tensors to be stacked. In which order dropout draws depends on their strides."""
    strides = [None if t.is_contiguous() else t.stride() for t in tensors]
    return tuple([(t.shape, t.dtype, t.device, t.requires_grad, s) for t, s in zip(tensors, strides, strict=True)])


def stacked_inputs(each: Sequence[T]) -> T:
    """One input of all trials, in which the axes of each have the order in memory that they have alone."""
    if each[0].is_contiguous():
        return torch.stack(list(each))
    own = torch.empty_like(each[0])
    memory = own.new_empty(len(each) * own.numel()).as_strided((len(each), *own.shape), (own.numel(), *own.stride()))
    for row, x in zip(memory, each, strict=True):
        row.copy_(x.detach())
    return memory


class FusedCall:
    """The common call of some models of a stack; ``calls[i]`` is row i here."""

    def __init__(self, stack: Stack, calls: list[Call], learning: bool, kind: Hashable = None) -> None:
        """``kind``: equal for calls in which dropout draws alike; of each, the first one is compared (`_compare`)."""
        self.stack, self.calls, self.kind = stack, calls, kind
        self.rows: list[int] = [call.slot.row for call in calls]  # type: ignore[misc]
        self.learns = calls[0].slot.learns if learning else tuple(False for _ in stack.columns)
        #: The rows whose backward pass is still to come.
        self.to_come = set(range(len(calls)))
        self.parameters: list[T] = []
        self.inputs: list[T] = []
        self.outputs: list[T] = []
        self.forward()

    def forward(self) -> None:
        """
        Raises:
            NotFusable, or what the model raises: nothing has changed.
        """
        stack, carrier = self.stack, self.calls[0].slot
        self.parameters = [
            rows_of(of_all, self.rows).detach().requires_grad_(learns)
            for of_all, learns in zip(stack.parameters, self.learns, strict=True)
        ]
        buffers = [rows_of(of_all, self.rows) for of_all in stack.buffers]
        kept = [buffer.clone() for buffer in buffers]
        self.inputs = [stacked_inputs(each) for each in zip(*[call.tensors for call in self.calls], strict=True)]
        self.inputs = [
            x.detach().requires_grad_(mine.requires_grad and torch.is_grad_enabled())
            for x, mine in zip(self.inputs, self.calls[0].tensors, strict=True)
        ]
        for call in self.calls:  # the loop has handed its streams over only now
            call.drawn = call.streams.torch, call.streams.gpu
        draws = Draws([call.streams for call in self.calls])
        try:
            with _in_place(carrier, self.parameters, buffers), _rates(self.calls), layer_forms.drawing(draws):
                before = mark_of_process()
                args, kwargs = self.calls[0].rebuild([x.as_subclass(Stacked) for x in self.inputs])
                versions = [x._version for x in self.inputs]
                value = nn.Module._call_impl(carrier.model, *args, **kwargs)
                if before != mark_of_process():
                    raise NotFusable("its forward draws random numbers")
                if versions != [x._version for x in self.inputs]:
                    raise NotFusable("its forward changes its input")
                new = _new_buffers(carrier, buffers)
            self._keep_outputs(value)
            if carrier.attributes.written():
                raise NotFusable(WRITES)
            if draws.drawn and self.kind not in stack.compared:
                self._compare(kept)
                stack.compared.add(self.kind)
        except BaseException:
            carrier.attributes.restore()
            for buffer, as_it_was in zip(buffers, kept, strict=True):
                buffer.copy_(as_it_was)
            raise
        for of_all, buffer in zip(stack.buffers, new, strict=True):
            put_rows(of_all, self.rows, buffer)
        draws.keep()

    def _compare(self, buffers: list[T]) -> None:
        """Whether the trial that drops out most has the outputs that it has alone, with these ``buffers`` of all.

        Raises:
            NotFusable: it has others, so that its masks are not its own.
        """
        most = [sum(rate for rate in call.slot.attributes.rates() if rate < 1) for call in self.calls]
        row = most.index(max(most))
        alone: list[T] = []
        with torch.no_grad():
            take_apart(self._again(self.calls[row], [buffer[row] for buffer in buffers]), alone)
        for out, expected in zip(self.outputs, alone, strict=True):
            if not (out[row] - expected).float().norm() <= SAME_MASK * expected.float().norm():
                raise NotFusable("its dropout draws in another order for several trials")

    def _keep_outputs(self, value: Any) -> None:
        found: list[T] = []

        def take(item: Any) -> Any:
            if type(item) is Stacked:
                found.append(plain(item))
                return torch.empty(0)
            if type(item) is torch.Tensor:
                found.append(item.expand(len(self.calls), *item.shape))
                return torch.empty(0)
            if isinstance(item, tuple | list):
                inner = [take(each) for each in item]
                return getattr(type(item), "_make", type(item))(inner)
            if type(item) is dict:
                return {name: take(each) for name, each in item.items()}
            return item

        _, self.build = take_apart(take(value), [])
        self.outputs = found

    # -- one trial's part, in its thread --

    def value(self, row: int) -> Any:
        """What the call returns in the trial of this row."""
        learning = torch.is_grad_enabled() and any(out.requires_grad for out in self.outputs)
        if not learning:
            return self.build([out[row].detach().clone() for out in self.outputs])
        call = self.calls[row]
        outputs = _Join.apply(self, row, *call.tensors, *call.slot.parts.parameters)
        return self.build(list(outputs))

    def of_trial(self, row: int, grads: list[T | None]) -> tuple[T | None, ...]:
        """The gradients of this row's inputs and parameters, for those of its outputs."""
        call = self.calls[row]
        if torch.is_grad_enabled():
            call.part("it differentiates its gradients")
            return self._alone(row, grads)
        if row not in self.to_come or call.versions[1] != call.slot.versions():
            return self._alone(row, grads)
        request = Request((self, "backward"), self.backward, self.stack.took.get("backward", math.inf), (row, grads))
        call.wait(request)
        return self._alone(row, grads) if request.result is None else request.result

    @staticmethod
    def _again(call: Call, buffers: Sequence[T] = ()) -> Any:
        """What the trial's own model returns for this call, with the streams and flags, and these ``buffers``, of then.

        Nothing has changed afterwards.
        """
        parts = call.slot.parts
        now, training = torch_streams(), [module.training for module in parts.modules]
        kept = [buffer.clone() for buffer in parts.buffers]
        try:
            put_torch_streams(call.drawn)
            for module, flag in zip(parts.modules, call.training, strict=True):
                module.training = flag
            _put_buffers(parts.buffers, buffers)
            args, kwargs = call.rebuild(list(call.tensors))
            return nn.Module._call_impl(call.slot.model, *args, **kwargs)
        finally:
            put_torch_streams(now)
            for module, flag in zip(parts.modules, training, strict=True):
                module.training = flag
            _put_buffers(parts.buffers, kept)

    def _alone(self, row: int, grads: list[T | None]) -> tuple[T | None, ...]:
        """As `of_trial`, by the trial's own model: its forward again, as it was.

        Raises:
            RuntimeError: its parameters or inputs have changed since.
        """
        call = self.calls[row]
        slot = call.slot
        if call.versions != ([t._version for t in call.tensors], slot.versions()):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation"
            )
        outputs: list[T] = []
        with torch.enable_grad():
            take_apart(self._again(call), outputs)
        of = [*call.tensors, *slot.parts.parameters]
        wanted = [t for t in of if t.requires_grad]
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
        found = iter(
            torch.autograd.grad(
                [out for out, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                allow_unused=True,
                create_graph=torch.is_grad_enabled(),
            )
        )
        return tuple([next(found) if t.requires_grad else None for t in of])

    def backward(self, requests: list[Request]) -> None:
        """The gradients of some rows, by `Request.data`: the row, and the gradients of its outputs."""
        began = time.perf_counter()
        try:
            with torch.no_grad():
                self._backward(requests)
        except BaseException:
            return  # each trial computes its own, and meets what is wrong there
        self.stack.took["backward"] = time.perf_counter() - began

    def _backward(self, requests: list[Request]) -> None:
        given = {row: grads for row, grads in (request.data for request in requests)}
        learn = [i for i, out in enumerate(self.outputs) if out.requires_grad]
        learn = [i for i in learn if any(grads[i] is not None for grads in given.values())]
        sums = []
        for i in learn:
            none = torch.zeros_like(self.outputs[i][0])
            each = [given[row][i] if row in given else None for row in range(len(self.calls))]
            sums.append(torch.stack([none if grad is None else grad for grad in each]))
        self.to_come -= given.keys()
        wanted = [x for x in (*self.inputs, *self.parameters) if x.requires_grad]
        found = iter(
            torch.autograd.grad(
                [self.outputs[i] for i in learn], wanted, sums, allow_unused=True, retain_graph=bool(self.to_come)
            )
        )
        of_inputs = [next(found) if x.requires_grad else None for x in self.inputs]
        of_parameters = [next(found) if x.requires_grad else None for x in self.parameters]
        flat = self.stack.flat.new_empty(len(self.calls), self.stack.flat.shape[1])
        views = self.stack.views(flat)
        here = [(view, grad) for view, grad in zip(views, of_parameters, strict=True) if grad is not None]
        if here:
            torch._foreach_copy_([view for view, _ in here], [grad for _, grad in here])
        absent: list[Any] = [None] * len(self.calls)
        by_row = [absent if grad is None else grad.unbind() for grad in of_inputs]
        by_row += [absent if grad is None else view.unbind() for view, grad in zip(views, of_parameters, strict=True)]
        for request in requests:
            row = request.data[0]
            self.calls[row].slot.gradients = (flat, row)
            request.result = tuple([rows[row] for rows in by_row])


class _Join(torch.autograd.Function):
    """Joins one trial's inputs and parameters to its outputs of a `FusedCall`."""

    @staticmethod
    def forward(ctx: Any, call: FusedCall, row: int, *tensors: T) -> tuple[T, ...]:
        ctx.call, ctx.row = call, row
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tensors[0].new_empty(0))  # torch says what it says of a graph that was used up
        outputs = tuple([out.detach()[row].clone() for out in call.outputs])
        ctx.mark_non_differentiable(
            *[mine for mine, out in zip(outputs, call.outputs, strict=True) if not out.requires_grad]
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: T | None) -> Any:
        _ = ctx.saved_tensors
        return None, None, *ctx.call.of_trial(ctx.row, list(grads))


def _put_buffers(buffers: Sequence[T], values: Sequence[T]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=False):
            buffer.data.copy_(value)  # `.data`: not a change for the graph that has kept it


@contextlib.contextmanager
def _in_place(carrier: Slot, parameters: list[T], buffers: list[T]) -> Iterator[None]:
    """Let the carrier's modules have the tensors of all trials."""
    places = carrier.parts.parameter_places + carrier.parts.buffer_places
    own = [holder[name] for holder, name in places]
    recurrent = [(m.__dict__, m._flat_weights) for m in carrier.parts.modules if isinstance(m, nn.RNNBase)]
    swap = {id(mine): of_all.as_subclass(Stacked) for mine, of_all in zip(own, (*parameters, *buffers), strict=True)}
    try:
        for (holder, name), mine in zip(places, own, strict=True):
            holder[name] = swap[id(mine)]
        for holder, weights in recurrent:
            holder["_flat_weights"] = [swap[id(weight)] for weight in weights]
        yield
    finally:
        for (holder, name), mine in zip(places, own, strict=True):
            holder[name] = mine
        for holder, weights in recurrent:
            holder["_flat_weights"] = weights


def _new_buffers(carrier: Slot, buffers: list[T]) -> list[T]:
    """The buffers after the forward, which may have put others in their places."""
    new = []
    for (holder, name), before in zip(carrier.parts.buffer_places, buffers, strict=True):
        now = holder.get(name)
        if not isinstance(now, T) or now.requires_grad:
            raise NotFusable(f"its buffer {name} is removed, or learns")
        now = plain(now) if type(now) is Stacked else now.expand(len(before), *now.shape)
        if now.shape[1:] != before.shape[1:] or now.dtype != before.dtype:
            raise NotFusable(f"its buffer {name} changes its shape or dtype")
        new.append(now)
    return new


@contextlib.contextmanager
def _rates(calls: list[Call]) -> Iterator[None]:
    """Let the layers that drop out have the rates of all trials."""
    attributes = calls[0].slot.attributes
    mine = attributes.rates()
    of_all = list(zip(*[call.slot.attributes.rates() for call in calls], strict=True))
    attributes.set_rates([layer_forms.PerTrial(rates) for rates in of_all])
    try:
        yield
    finally:
        attributes.set_rates(mine)
