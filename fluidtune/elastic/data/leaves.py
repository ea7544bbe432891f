"""What is no tensor in the `state_dict`s of a trial, as bytes: a copy that any process of the trial can read.

A `state_dict` may hold anything: a lambda, an object of one of the script's classes, another scheduler with its
optimizer. Such a leaf is pickled. Where it refers to what `elastic.prepare` got, or to a class that no import finds,
the bytes have a name in its place, and whoever reads them gets what its own process has by that name. So a scheduler
steers the optimizer that steps, and an enumeration's member is the one that the loop compares it with.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy
import torch

from fluidtune.code_origin import is_importable

from .plain_state import Drawing
from .trees import map_tensors

#: What needs no copy.
_PLAIN = {type(None), bool, int, float, complex, str, bytes}


@dataclass(frozen=True)
class Packed:
    """A leaf that was pickled."""

    data: bytes


class Leaves:
    """Packs and unpacks the leaves of a trial's states.

    ``pickling``: a module like `pickle`; that of the host also writes what is defined in the script itself.
    ``prepared``: the objects that have names, in the order in which the loop prepares them; it may grow.
    ``device``: where the trial's tensors are.
    """

    def __init__(self, pickling: ModuleType, prepared: Sequence[Any], device: torch.device) -> None:
        self._pickling, self._prepared, self._device = pickling, prepared, device

    def packer(self) -> Callable[[Any], Any]:
        """What packs each leaf of a tree. It raises what pickling the leaf raises."""
        names, pickling = self._names(), self._pickling

        class Pickler(pickling.Pickler):  # type: ignore[name-defined,misc]
            def persistent_id(self, obj: Any) -> Any:
                if id(obj) in names:
                    return names[id(obj)]
                if isinstance(obj, torch.Tensor) and _is_elsewhere(obj):
                    kept = elsewhere.setdefault(id(obj), (obj.detach().cpu(), obj))
                    return "tensor", kept[0], isinstance(obj, torch.nn.Parameter), obj.requires_grad and obj.is_leaf
                if isinstance(obj, type) and not is_importable(obj):
                    return "class", obj.__module__, obj.__qualname__, pickling.dumps(obj)
                return None

        #: By id, the copies of tensors that are not on the CPU, with the tensors.
        elsewhere: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def pack(leaf: Any) -> Any:
            if type(leaf) in _PLAIN or isinstance(leaf, numpy.generic):
                return leaf
            if type(leaf) is numpy.ndarray and not leaf.dtype.hasobject:
                return leaf.copy()
            data = io.BytesIO()
            Pickler(data).dump(leaf)
            return Packed(data.getvalue())

        return pack

    def unpacked(self, tree: Any, like: Any) -> Any:
        """The tree as it was before `packer`, with what this process has. ``like``: its own tree, as it is now."""
        prepared, device, classes = self._prepared, self._device, self._classes(like)
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def on_device(kept: torch.Tensor, learns: bool, is_parameter: bool) -> torch.Tensor:
            moved = kept.to(device, copy=True)
            return torch.nn.Parameter(moved, learns) if is_parameter else moved.requires_grad_(learns)

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, name: Any) -> Any:
                kind, *where = name
                if kind == "tensor":
                    kept, is_parameter, learns = where
                    return found.setdefault(id(kept), (on_device(kept, learns, is_parameter), kept))[0]
                if kind == "class":
                    return classes.get((where[0], where[1])) or pickle.loads(where[2])
                owner = prepared[where[0]]
                if kind == "module":
                    return owner.get_submodule(where[1])
                if kind == "parameter":
                    return owner.get_parameter(where[1])
                return owner.generator if kind == "generator" else owner

        def unpack(leaf: Any) -> Any:
            if isinstance(leaf, Packed):
                return Unpickler(io.BytesIO(leaf.data)).load()
            return leaf.copy() if isinstance(leaf, numpy.ndarray) else leaf

        return map_tensors(lambda tensor: tensor, tree, unpack)

    def _names(self) -> dict[int, tuple[Any, ...]]:
        """By id, the names of the prepared objects, and of the parts and parameters of modules."""
        found: dict[int, tuple[Any, ...]] = {}
        for number, obj in enumerate(self._prepared):
            if isinstance(obj, torch.nn.Module):
                found |= {id(each): ("parameter", number, name) for name, each in obj.named_parameters()}
                found |= {id(part): ("module", number, name) for name, part in obj.named_modules()}
            if isinstance(obj, Drawing):
                found[id(obj.generator)] = ("generator", number)
            found[id(obj)] = ("object", number)
        return found

    def _classes(self, like: Any) -> dict[tuple[str, str], type]:
        """By module and name, the classes of the prepared objects here, and of what its tree holds."""
        found: dict[tuple[str, str], type] = {}

        def note(value: Any) -> None:
            kind = value if isinstance(value, type) else type(value)
            found.setdefault((kind.__module__, kind.__qualname__), kind)

        def note_leaf(leaf: Any) -> None:
            for value in (leaf, *getattr(leaf, "__dict__", {}).values()):
                note(value)

        map_tensors(lambda tensor: None, like, note_leaf)
        for obj in self._prepared:
            note(obj)
        return found


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"
