"""What `tune.with_parameters` hands to trials: tensors are in memory once a node, as with `fluidtune.shared`.

Ray keeps these objects in its object store. Arrays are views of it in all processes, but each process that gets a
tensor copies it. So the first process of a node that gets an object with large tensors gives it to the node's
`data_keeper`, and the others map it. Other objects come from the store as under stock Ray Tune.
"""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import suppress
from typing import Any

import ray

from fluidtune.cluster.data.data_keeper import VARIABLE
from fluidtune.cluster.data.shared_data import shared, tensor_bytes

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
        size = 0
        if "torch" in sys.modules:
            with suppress(pickle.PicklingError, TypeError, AttributeError, BufferError):
                size = tensor_bytes(found)
        if size >= _LARGE:
            return found
        self.value.append(found)
        return _Parameter

    def __reduce__(self) -> tuple[Any, ...]:
        # By this `shared` knows that two processes ask for the same object.
        return str, (self._reference.hex(),)
