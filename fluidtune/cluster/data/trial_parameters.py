"""What `tune.with_parameters` hands to trials: tensors are in memory once a node, as with `fluidtune.shared`.

Ray keeps these objects in its object store. Arrays are views of it in all processes, but each process that gets a
tensor copies it. So the first process of a node that gets an object with large tensors gives it to the node's
`data_keeper`, and the others map it. An object that has anything else in it than tensors, arrays, plain values, lists,
tuples and dicts comes from the store, as under stock Ray Tune.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import numpy
import ray

from fluidtune.cluster.data.data_keeper import VARIABLE
from fluidtune.cluster.data.shared_data import shared

#: An object with tensors of fewer bytes stays as it is. Judgement: a copy takes 10 ms.
_LARGE = 16 << 20


def fetched(reference: ray.ObjectRef) -> Any:
    """Return the object. What this process changes of its tensors is its own, as if they were copied."""
    if VARIABLE not in os.environ:
        return ray.get(reference)
    asked = _Parameter(reference)
    found = shared(asked)
    if found is not _Parameter:
        return found
    return asked.value[0] if asked.value else ray.get(reference)


class _Parameter:
    """Loads an object of the store. Returns this class in the place of one that stays there, which ``value`` has."""

    def __init__(self, reference: ray.ObjectRef) -> None:
        self._reference = reference
        self.value: list[Any] = []

    def __call__(self) -> Any:
        found = ray.get(self._reference)
        if "torch" in sys.modules and _tensor_bytes(found) >= _LARGE:
            return found
        self.value.append(found)
        return _Parameter

    def __reduce__(self) -> tuple[Any, ...]:
        # By this `shared` knows that two processes ask for the same object.
        return str, (self._reference.hex(),)


def _tensor_bytes(value: Any) -> float:
    """The memory of the tensors in it; not a number if there is anything else in it than the module says."""
    import torch

    kind = type(value)
    if kind is torch.Tensor:
        plain = value.device.type == "cpu" and value.layout is torch.strided and not value.requires_grad
        return value.untyped_storage().nbytes() if plain else math.nan
    if kind is torch.utils.data.TensorDataset:
        return _tensor_bytes(value.tensors)
    if kind in (list, tuple, dict):
        return sum(map(_tensor_bytes, [*value, *value.values()] if kind is dict else value))
    if kind is numpy.ndarray:
        return math.nan if value.dtype.hasobject else 0.0
    return 0.0 if kind in (str, bytes, int, float, bool, type(None)) else math.nan
