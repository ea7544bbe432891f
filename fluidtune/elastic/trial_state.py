"""What a trial consists of, as one value: taken from the user's objects, put back into them, sent to joiners.

It knows modules, optimizers, DataLoaders and anything else with ``state_dict`` and ``load_state_dict`` (LR
schedulers, gradient scalers), by the order in which `elastic.prepare` got them; every worker prepares the
same objects in the same order. The leader's random streams belong to a commit, but are never sent to
followers.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from .backends.base import CollectiveBackend
from .batchnorm import GlobalBatchStatistics
from .gradients import GradientReducer
from .group_view import GroupView
from .loader import ElasticLoader, generators_of

#: Tensors travel and are aligned in pieces of so many bytes; a piece is sent when it is full.
_PIECE = 32 * 2**20
_ALIGN = 16


class TrialState:
    """The user's objects of one trial in one worker, whose tensors are on ``device``."""

    def __init__(self, group: GroupView, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._stateful: list[Any] = []
        self._loose: list[torch.Tensor] = []  # parameters that an optimizer has and no module
        self._loaders: list[ElasticLoader] = []
        self._gradients = GradientReducer(group)
        self._statistics = GlobalBatchStatistics(group)

    def add(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take objects in; returns what the user is to work with. See `elastic.prepare` for the errors."""
        for obj in objects:  # before the optimizers, which then know what belongs to no module
            if isinstance(obj, torch.nn.Module):
                self._add_module(obj)
        return tuple(self._add(obj) for obj in objects)

    def _add(self, obj: Any) -> Any:
        if isinstance(obj, ElasticLoader):
            return obj
        if isinstance(obj, DataLoader):
            self._loaders.append(ElasticLoader(obj, self._group))
            return self._loaders[-1]
        if not all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"elastic.prepare() got a {type(obj).__name__}: expected a torch Module, Optimizer, LR "
                "scheduler, DataLoader, or another object with state_dict() and load_state_dict()"
            )
        if any(obj is known for known in self._stateful):
            return obj
        if isinstance(obj, torch.optim.Optimizer):
            parameters = [p for group in obj.param_groups for p in group["params"]]
            self._gradients.watch_steps(obj)
            self._loose += [parameter for parameter in parameters if self._gradients.watch(parameter)]
        self._stateful.append(obj)
        return obj

    def _add_module(self, module: torch.nn.Module) -> None:
        self._gradients.add(module)
        for part in module.modules():
            if isinstance(part, _BatchNorm):
                self._statistics.add(part)

    def set_width(self, width: int) -> None:
        """The group has this many workers from now on."""
        self._statistics.enable(width > 1)

    def capture(self) -> dict[str, Any]:
        """A snapshot on the CPU, that shares nothing with the live objects."""
        state = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), self._view(), copy.deepcopy)
        state["streams"] = {
            "python": random.getstate(),
            "numpy": numpy.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if self._device.type == "cuda":
            state["streams"]["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load(self, state: dict[str, Any], *, with_streams: bool) -> None:
        """Put a state back into the live objects, wherever their tensors are.

        ValueError if it is the state of other objects than those that were prepared.
        """
        have, want = _counts(self._view()), _counts(state)
        if have != want:
            raise ValueError(
                f"this state is of other objects than elastic.prepare() got: it has {want}, the loop {have}; "
                "prepare the same objects in the same order in every worker and every run of a trial"
            )
        for obj, part in zip(self._stateful, state["stateful"], strict=True):
            obj.load_state_dict(part)
        with torch.no_grad():
            for parameter, value in zip(self._loose, state["loose"], strict=True):
                parameter.copy_(value)
        self._gradients.load(state["parameters"])
        for generators, parts in zip(self._generators(), state["generators"], strict=True):
            for generator, part in zip(generators, parts, strict=True):
                generator.set_state(part)
        for loader, begun in zip(self._loaders, state["begun"], strict=True):
            loader.begun = begun
        if with_streams:
            streams = state["streams"]
            random.setstate(streams["python"])
            numpy.random.set_state(streams["numpy"])
            torch.set_rng_state(streams["torch"])
            if "cuda" in streams and self._device.type == "cuda":
                torch.cuda.set_rng_state(streams["cuda"], self._device)

    def broadcast(self, backend: CollectiveBackend) -> None:
        """All ranks of a group: take rank 0's state."""
        if backend.rank == 0:
            broadcast_tree(self._view(), backend)
        else:
            self.load(broadcast_tree(None, backend), with_streams=False)

    def _view(self) -> dict[str, Any]:
        return {
            "stateful": [obj.state_dict() for obj in self._stateful],
            "loose": list(self._loose),
            "parameters": self._gradients.view(),
            "generators": [[generator.get_state() for generator in found] for found in self._generators()],
            "begun": [loader.begun for loader in self._loaders],
        }

    def _generators(self) -> list[list[torch.Generator]]:
        return [generators_of(loader) for loader in self._loaders]


def _counts(state: dict[str, Any]) -> dict[str, Any]:
    """How many objects of which kind a state is of, to say so when it does not fit."""
    counts: dict[str, Any] = {name: len(state[name]) for name in ("stateful", "loose")}
    return {**counts, "generators": [len(found) for found in state["generators"]]}


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a tree that is sent without its tensors."""

    piece: int
    offset: int  # bytes
    size: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


def map_tensors(on_tensor: Callable[[torch.Tensor], Any], tree: Any, on_leaf: Callable[[Any], Any]) -> Any:
    """The same tree of dicts, lists and tuples with every tensor and every other leaf replaced."""
    if isinstance(tree, torch.Tensor):
        return on_tensor(tree)
    if isinstance(tree, dict):
        items = [(key, map_tensors(on_tensor, value, on_leaf)) for key, value in tree.items()]
        if type(tree) is OrderedDict:
            ordered = OrderedDict(items)
            ordered.__dict__.update(tree.__dict__)  # a module's state_dict carries its versions in _metadata
            return ordered
        return dict(items) if type(tree) is dict else on_leaf(tree)
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(on_tensor, value, on_leaf) for value in tree)
    return on_leaf(tree)


def broadcast_tree(tree: Any, backend: CollectiveBackend) -> Any:
    """Rank 0's tree on every rank: its shape as one object, its tensors as raw bytes in pieces of 32 MiB.

    Tensors on the backend's device travel from there, those on the CPU over the CPU; none is pickled.
    """
    pieces: list[list[torch.Tensor]] = []
    sizes: list[int] = []
    kinds: list[str] = []

    def place(tensor: torch.Tensor) -> _Slot:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        kind = "cpu" if data.device.type == "cpu" else "device"
        open_piece = max((i for i, k in enumerate(kinds) if k == kind), default=-1)
        if open_piece < 0 or sizes[open_piece] + data.numel() > _PIECE:
            open_piece = len(pieces)
            pieces.append([])
            sizes.append(0)
            kinds.append(kind)
        slot = _Slot(open_piece, sizes[open_piece], data.numel(), tuple(tensor.shape), tensor.dtype)
        pieces[open_piece].append(data)
        gap = -data.numel() % _ALIGN
        if gap:
            pieces[open_piece].append(data.new_zeros(gap))
        sizes[open_piece] += data.numel() + gap
        return slot

    if backend.rank == 0:
        skeleton = map_tensors(place, tree, lambda leaf: leaf)
        backend.broadcast_object((skeleton, list(zip(sizes, kinds, strict=True))))
        for piece in pieces:
            backend.broadcast_(torch.cat(piece))
        return tree
    skeleton, layout = backend.broadcast_object()
    received = []
    for size, kind in layout:
        device = torch.device("cpu") if kind == "cpu" else backend.device
        received.append(torch.empty(size, dtype=torch.uint8, device=device))
        backend.broadcast_(received[-1])

    def pick(leaf: Any) -> Any:
        if not isinstance(leaf, _Slot):
            return leaf
        data = received[leaf.piece][leaf.offset : leaf.offset + leaf.size]
        # A tensor of its own: Generator.set_state crashes on one that does not start its storage
        return data.view(leaf.dtype).reshape(leaf.shape).clone()

    return map_tensors(lambda tensor: tensor, skeleton, pick)
