"""What is no tensor in the `state_dict`s of a trial, as bytes: a copy that any worker of the trial can read.

A `state_dict` may hold anything: a lambda, an object of one of the script's classes, another scheduler with its
optimizer. Such a leaf is pickled. Where it refers to what `elastic.prepare` got, the bytes have a name in its place,
and whoever reads them gets what its own worker has by that name: a scheduler then steers the optimizer that steps.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ..transport.trees import map_tensors

#: What needs no copy, and what every worker can read.
_PLAIN = {type(None), bool, int, float, complex, str, bytes}


@dataclass(frozen=True)
class Packed:
    """A leaf that was pickled."""

    data: bytes


class Leaves:
    """Packs and unpacks the leaves of one worker's states.

    ``pickling``: a module like `pickle`; that of the host also writes what is defined in the script itself.
    ``prepared``: the objects that have names, in the order in which every worker prepares them; it may grow.
    ``device``: where the worker's tensors are.
    """

    def __init__(self, pickling: ModuleType, prepared: Sequence[Any], device: torch.device) -> None:
        self._pickling, self._prepared, self._device = pickling, prepared, device

    def packed(self, tree: Any) -> Any:
        """The tree with its leaves packed, and its tensors as they are. Raises what pickling a leaf raises."""
        return map_tensors(lambda tensor: tensor, tree, self.pack)

    def pack(self, leaf: Any) -> Any:
        """The leaf as it is sent and committed; see `packed`."""
        if type(leaf) in _PLAIN:
            return leaf
        names = self._names()

        class Pickler(self._pickling.Pickler):  # type: ignore[name-defined,misc]
            def persistent_id(self, obj: Any) -> Any:
                if id(obj) in names:
                    return names[id(obj)]
                if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
                    return "tensor", obj.detach().cpu()
                return None

        data = io.BytesIO()
        Pickler(data).dump(leaf)
        return Packed(data.getvalue())

    def unpacked(self, tree: Any) -> Any:
        """The tree as it was before `packed`, with what this worker has prepared."""
        return map_tensors(lambda tensor: tensor, tree, self._unpack)

    def _unpack(self, leaf: Any) -> Any:
        if not isinstance(leaf, Packed):
            return leaf
        prepared, device = self._prepared, self._device

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, name: Any) -> Any:
                kind, *where = name
                if kind == "tensor":
                    return where[0].to(device)
                found = prepared[where[0]]
                if kind == "module":
                    return found.get_submodule(where[1])
                return found.get_parameter(where[1]) if kind == "parameter" else found

        return Unpickler(io.BytesIO(leaf.data)).load()

    def trouble(self, tree: Any) -> str | None:
        """What no other worker can read of the tree, in words; None: nothing."""
        try:
            skeleton = map_tensors(lambda tensor: None, tree, self.pack)
            pickle.dumps(skeleton)  # keys of dicts
        except Exception as error:
            return f"a value that cannot be pickled ({type(error).__name__}: {error})"
        return None

    def _names(self) -> dict[int, tuple[Any, ...]]:
        """By id, the names of the prepared objects, and of the parts and parameters of modules."""
        found: dict[int, tuple[Any, ...]] = {}
        for number, obj in enumerate(self._prepared):
            if isinstance(obj, torch.nn.Module):
                found |= {id(each): ("parameter", number, name) for name, each in obj.named_parameters()}
                found |= {id(part): ("module", number, name) for name, part in obj.named_modules()}
            found[id(obj)] = ("object", number)
        return found
