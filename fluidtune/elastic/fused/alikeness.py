"""Which models can be trained as one: seen from their modules, before anything is tried.

Two models are *alike* if their `Shape` is equal. What a forward may depend on besides (training or not, and the plain
attributes of modules) may change while a trial trains. It is compared at each call (`Attributes`).
"""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .stacked_tensor import NotFusable

#: The attributes that every module has, apart from whether it trains.
_OF_EVERY_MODULE = set(nn.Module().__dict__) - {"training"}
_HOOKS = [name for name, value in nn.Module().__dict__.items() if "hooks" in name and isinstance(value, dict)]
_GLOBAL_HOOKS = [value for name, value in vars(torch_module).items() if name.startswith("_global_") and "hooks" in name]
#: Attributes that may differ by trial: the rate at which a layer drops out.
_RATES: dict[type, str] = {
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), "p"),
    nn.MultiheadAttention: "dropout",
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), "dropout"),
}
#: Values that are compared by themselves; torch's dtypes and devices among them.
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.layout, type)
#: Where a recurrent layer keeps its parameters a second time; `fused_call` looks after that.
_SECOND_PLACE = {"_flat_weights", "_flat_weight_refs"}

Place = tuple[dict[str, Any], str]


@dataclass(frozen=True)
class Shape:
    """What must be equal for two models to be trained as one: types of modules, names, shapes, dtypes, devices."""

    modules: tuple[Any, ...]
    parameters: tuple[Any, ...]
    buffers: tuple[Any, ...]


@dataclass
class Parts:
    """The parameters and buffers of a model, and where its modules keep them."""

    shape: Shape
    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    parameter_places: list[Place]
    buffers: list[torch.Tensor]
    buffer_places: list[Place]


def parts(model: nn.Module) -> Parts:
    """What a model consists of.

    Raises:
        NotFusable: it has something that cannot be done for several trials at once.
    """
    modules = list(model.modules())
    order = {id(module): number for number, module in enumerate(modules)}
    names = tuple((name, order[id(m)], type(m)) for name, m in model.named_modules(remove_duplicate=False))
    for name, module in model.named_modules():
        _check_module(name or type(module).__name__, module)
    places = [(m._parameters, name) for m in modules for name, p in m._parameters.items() if p is not None]
    parameters: list[Any] = [holder[name] for holder, name in places]
    if len({id(p) for p in parameters}) < len(parameters):
        raise NotFusable("it has tied parameters")
    if not parameters:
        raise NotFusable("it has no parameters")
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) > 1 or not parameters[0].is_floating_point():
        raise NotFusable("its parameters are not of one real dtype on one device")
    if any(type(p) is not nn.Parameter or p.layout != torch.strided for p in parameters):
        raise NotFusable("its parameters are lazy, sparse, quantised or of a class of their own")
    if not all(p.is_contiguous() for p in parameters):
        raise NotFusable("its parameters are not contiguous (channels last, for example)")
    buffer_places = [(m._buffers, name) for m in modules for name, b in m._buffers.items() if b is not None]
    buffers: list[Any] = [holder[name] for holder, name in buffer_places]
    if len({id(b) for b in buffers}) < len(buffers) or any(b.requires_grad for b in buffers):
        raise NotFusable("it has tied buffers, or buffers that learn")
    if any(b.is_complex() or b.is_quantized or b.layout != torch.strided or not b.is_contiguous() for b in buffers):
        raise NotFusable("it has complex, quantised, sparse or non-contiguous buffers")
    shape = Shape(names, tuple(map(_kind, places)), tuple(map(_kind, buffer_places)))
    return Parts(shape, modules, parameters, places, buffers, buffer_places)


def _kind(place: Place) -> tuple[Any, ...]:
    tensor = place[0][place[1]]
    return place[1], tensor.shape, tensor.dtype, tensor.device


def _check_module(name: str, module: nn.Module) -> None:
    if nn.utils.parametrize.is_parametrized(module):
        raise NotFusable(f"{name} has parametrizations")
    if any(getattr(module, hooks) for hooks in _HOOKS):
        raise NotFusable(f"{name} has hooks")
    if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
        raise NotFusable(f"{name} is compiled")
    if type(module).__module__.startswith("torch._dynamo"):
        raise NotFusable(f"{name} is compiled")
    if "forward" in module.__dict__:
        raise NotFusable(f"{name} has a forward of its own")
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.sparse or module.max_norm is not None):
        raise NotFusable(f"{name} has sparse gradients, or max_norm")


class Attributes:
    """The plain attributes of a model's modules, on which its forward may depend.

    Raises:
        NotFusable: one is something that cannot be compared, such as a tensor.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._hooks = [getattr(module, hooks) for module in modules for hooks in _HOOKS]
        self._rates = [
            (m.__dict__, _RATES[type(m)]) for m in modules if type(m) in _RATES and _RATES[type(m)] in m.__dict__
        ]
        self._read()

    def _read(self) -> None:
        rates = {(id(holder), key) for holder, key in self._rates}
        self._count = sum(len(module.__dict__) for module in self._modules)
        self._held: list[tuple[dict[str, Any], str, Any]] = []
        self._containers: list[tuple[dict[str, Any], str, Any]] = []
        values: list[Any] = []
        for module in self._modules:
            for key, value in module.__dict__.items():
                if key in _OF_EVERY_MODULE or (isinstance(module, nn.RNNBase) and key in _SECOND_PLACE):
                    continue
                if (id(module.__dict__), key) in rates:
                    continue
                values.append((key, _comparable(f"{type(module).__name__}.{key}", value)))
                self._held.append((module.__dict__, key, value))
                if isinstance(value, list | dict | set | tuple) and value:
                    self._containers.append((module.__dict__, key, copy.deepcopy(value)))
        #: The attributes as values that compare equal for two models if their forwards may not differ by them.
        self.values = values

    def changed(self) -> bool:
        """Whether an attribute has changed since the last look, which this one is now.

        Raises:
            NotFusable: hooks have come, or what cannot be compared.
        """
        if any(self._hooks) or any(_GLOBAL_HOOKS):
            raise NotFusable("it has hooks")
        if self._unchanged():
            return False
        self._read()
        return True

    def _unchanged(self) -> bool:
        return (
            all(holder.get(key) is value for holder, key, value in self._held)
            and sum(len(module.__dict__) for module in self._modules) == self._count
            and all(holder[key] == value for holder, key, value in self._containers)
        )

    def written(self) -> bool:
        """Whether a forward has just written an attribute."""
        return not self._unchanged()

    def restore(self) -> None:
        """Undo what a forward has written."""
        for holder, key, value in self._held:
            holder[key] = value
        for holder, key, value in self._containers:
            holder[key] = copy.deepcopy(value)
        known = {(id(holder), key) for holder, key, _ in self._held}
        known |= {(id(holder), key) for holder, key in self._rates}
        for module in self._modules:
            for key in list(module.__dict__):
                if key not in _OF_EVERY_MODULE | _SECOND_PLACE and (id(module.__dict__), key) not in known:
                    del module.__dict__[key]

    def rates(self) -> list[float]:
        return [float(holder[key]) for holder, key in self._rates]

    def set_rates(self, rates: list[float]) -> None:
        for (holder, key), rate in zip(self._rates, rates, strict=True):
            holder[key] = rate


def _comparable(name: str, value: Any) -> Any:
    """A value that is equal for two models if ``value`` does the same in both."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple | list | set | frozenset):
        return type(value), tuple(_comparable(name, item) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((key, _comparable(name, item)) for key, item in value.items())
    if isinstance(value, types.FunctionType) and not value.__closure__:
        return value.__code__, _comparable(name, value.__defaults__)
    if isinstance(value, torch.Tensor | nn.Module):
        raise NotFusable(f"its attribute {name} is a tensor or module that is not registered")
    return _Identical(value)


class _Identical:
    """Equal only for the same object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identical) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]
