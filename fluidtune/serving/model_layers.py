"""A model as layers in a row: the children of a `torch.nn.Sequential`, or the functions in its attribute ``stages``.

Of a Sequential, inputs that are numbers, or lists of numbers of one shape, become one tensor; other inputs are handed
to its first child as they are. The functions in ``stages`` get and return what they like: the first one the inputs, the
last one as many outputs. All times are seconds.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fluidtune.device_kinds import ACCELERATORS, started

#: The fewest and the most runs of a layer, after a first one, and their seconds; as batches are in
#: `symphony_serve.shell.measuring`, whose import would take a model process 50 ms.
LEAST_RUNS, MOST_RUNS, SECONDS_EACH = 5, 30, 0.1


class Layer(NamedTuple):
    """What a layer needs: seconds for a batch of 1, bytes of weights, and bytes of what it returns for that batch.

    Weights are counted of torch modules, activations of tensors and arrays.
    """

    seconds: float
    weights: int
    activations: int


class Stage(NamedTuple):
    """Layers from ``first`` to before ``end``, with the sums of their seconds and weights.

    activations: bytes that the last of them returns for a batch of 1.
    """

    first: int
    end: int
    seconds: float
    weights: int
    activations: int


class Layers:
    """Functions in a row, as one function from inputs to as many outputs.

    samples: the model's. tensors: whether inputs become a tensor.
    """

    def __init__(self, functions: Sequence[Callable[[Any], Any]], samples: Any, tensors: bool):
        self.functions, self.samples = list(functions), samples
        #: Of the tensor that inputs become; None: they stay a list.
        self._dtype = _dtype(samples) if tensors else None

    def __call__(self, inputs: Any) -> Any:
        return self.run(self.begin(inputs))

    def begin(self, inputs: Any) -> Any:
        """What the first layer gets."""
        return inputs if self._dtype is None else _torch().as_tensor(inputs, dtype=self._dtype)

    def run(self, value: Any) -> Any:
        """What the layers return for what the first of them gets. Tensors are brought to where a module is."""
        for function in self.functions:
            value = _ran(function, value)
        return value

    def keep(self, stage: Stage) -> None:
        """Drop the other layers. On a GPU, those that are kept are moved there."""
        self.functions = self.functions[stage.first : stage.end]
        gc.collect()
        for kind in ACCELERATORS if _torch() is not None else ():
            if (module := getattr(_torch(), kind)).is_available():
                for function in self.functions:
                    if isinstance(function, _torch().nn.Module):
                        function.to(kind)
                module.empty_cache()

    def measured(self, inputs: Any) -> list[Layer]:
        """What each layer needs, found with a batch of one input."""
        value, found = self.begin(inputs), []
        for function in self.functions:
            times: list[float] = []
            while len(times) <= LEAST_RUNS or (len(times) <= MOST_RUNS and sum(times) < SECONDS_EACH):
                began = time.monotonic()
                after = _ran(function, value)
                _wait()
                times.append(time.monotonic() - began)
            found.append(Layer(statistics.median(times[1:]), _weights(function), _size(after)))
            value = after
        return found


def layers_of(model: Any) -> Layers | None:
    """The layers of a model; None: it is none that has layers. A Sequential with a ``forward`` of its own has none."""
    torch, samples, stages = _torch(), getattr(model, "samples", None), getattr(model, "stages", None)
    if isinstance(stages, list | tuple) and stages and all(map(callable, stages)):
        return Layers(stages, samples, tensors=False)
    sequential = torch is not None and isinstance(model, torch.nn.Sequential)
    if sequential and len(model) and type(model).forward is torch.nn.Sequential.forward:
        return Layers(list(model), samples, tensors=True)
    return None


def as_function(model: Any) -> Any:
    """The model as a function of a list of inputs, if it has layers and is none; else the model."""
    is_module = _torch() is not None and isinstance(model, _torch().nn.Sequential)
    return (layers_of(model) or model) if is_module or not callable(model) else model


def carried(value: Any) -> Any:
    """What goes to another process: tensors on the CPU."""
    return mapped(value, _is_tensor, lambda tensor: tensor.cpu())


def writable(value: Any) -> Any:
    """What has come from another process, for layers that change it: arrays that Ray hands over read-only are copied.

    One that stands at several places is one after it, too.
    """
    copies: dict[int, Any] = {}

    def own(array: Any) -> Any:
        return array if array.flags.writeable else copies.setdefault(id(array), array.copy())

    numpy = sys.modules.get("numpy")
    return value if numpy is None else mapped(value, lambda one: isinstance(one, numpy.ndarray), own)


def has_tensors(value: Any) -> bool:
    """Whether it is a tensor, or has one in lists and mappings. Of a list the first item is looked at."""
    if isinstance(value, Mapping):
        return any(map(has_tensors, value.values()))
    return isinstance(value, tensor_type()) or (isinstance(value, list) and bool(value) and has_tensors(value[0]))


def tensor_type() -> Any:
    """The type of tensors; none without torch."""
    return _torch().Tensor if _torch() is not None else ()


def _torch() -> Any:
    """torch, if this process has imported it; a model without it has no tensors."""
    return sys.modules.get("torch")


def _dtype(samples: Any) -> Any:
    """Of the samples as one tensor; None: they cannot be one."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return _torch().as_tensor(samples).dtype
    return None


def _ran(function: Callable[[Any], Any], value: Any) -> Any:
    torch = _torch()
    if torch is None:
        return function(value)
    first = next(function.parameters(), None) if isinstance(function, torch.nn.Module) else None
    if first is not None:
        value = mapped(value, _is_tensor, lambda tensor: tensor.to(first.device))
    with torch.inference_mode():
        return function(value)


def _wait() -> None:
    """Wait for the GPU."""
    for each in started().values():
        each.synchronize()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, tensor_type())


def mapped(value: Any, is_one: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """The value with each one in it changed, also in tuples, lists and dictionaries."""
    if is_one(value):
        return change(value)
    if isinstance(value, tuple | list):
        inner = [mapped(one, is_one, change) for one in value]
        return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
    if isinstance(value, dict):
        return {key: mapped(one, is_one, change) for key, one in value.items()}
    return value


def _weights(function: Any) -> int:
    if _torch() is None or not isinstance(function, _torch().nn.Module):
        return 0
    return sum(one.numel() * one.element_size() for one in (*function.parameters(), *function.buffers()))


def _size(value: Any) -> int:
    """Bytes of the tensors and arrays in a value."""
    if isinstance(value, tuple | list):
        return sum(map(_size, value))
    return sum(map(_size, value.values())) if isinstance(value, dict) else int(getattr(value, "nbytes", 0))
