"""What `tune.with_parameters` hands to trials: tensors are in memory once a node, as with `fluidtune.shared`.

Ray keeps these objects in its object store. Arrays are views of it in all processes, but each process that gets a
tensor copies it. So the first process of a node that gets an object with large tensors shares it with the others. An
object that has anything else in it than tensors, arrays, plain values, lists, tuples and dicts comes from the store, as
under stock Ray Tune.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from typing import Any

import numpy
import ray

from fluidtune.cluster.data.node_files import VARIABLE
from fluidtune.cluster.data.shared_data import once_a_node

#: An object with tensors of fewer bytes stays as it is. Judgement: a copy takes 10 ms.
_LARGE = 16 << 20


def fetched(reference: ray.ObjectRef) -> Any:
    """Return the object. What this process changes of its tensors is its own, as if they were copied."""

    def load() -> Any:
        """The object if it is to be shared, in a list; None: it stays in the store."""
        value = ray.get(reference)
        return [value] if "torch" in sys.modules and _tensor_bytes(value) >= _LARGE else None

    found = once_a_node(hashlib.sha256(reference.binary()).digest(), load) if VARIABLE in os.environ else None
    return ray.get(reference) if found is None else found[0]


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
