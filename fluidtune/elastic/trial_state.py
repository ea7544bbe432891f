"""A trial's state as one value, which is taken from the user's objects, put back into them, and sent to joiners.

It covers modules, optimizers, DataLoaders and all other objects with ``state_dict`` and ``load_state_dict`` (LR
schedulers, gradient scalers). Objects are identified by the order in which `elastic.prepare` got them: every worker
prepares the same objects in the same order. The leader's random streams belong to a commit, but are never sent to
followers.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from .backends.base import CollectiveBackend
from .batchnorm import GlobalBatchStatistics
from .comparison import digest_of, digest_of_tensors, distance_between, plain_leaves
from .gradients import CAPTURED, GradientReducer
from .group_view import GroupView
from .loader import ElasticLoader, generators_of
from .random_streams import capture_streams, restore_streams
from .steering import Steering

#: Bytes of the buffers in which tensors are sent. Judgement: large enough that the time of a message does not count,
#: and the most memory that sending takes at a time.
_PIECE = 32 * 2**20
#: Bytes to which each tensor in a buffer is aligned: the size of the largest element type, complex128.
_ALIGN = 16


class TrialState:
    """The user's objects of one trial in one worker; their tensors are on ``device``."""

    def __init__(self, group: GroupView, device: torch.device) -> None:
        self._group = group
        self._gpu = str(device) if device.type == "cuda" else "cuda"
        self._stateful: list[Any] = []
        self._loose: list[torch.Tensor] = []  # parameters of an optimizer that belong to no module
        self._loaders: list[ElasticLoader] = []
        self._steps = 0  # of all optimizers, in this turn
        self._begun_as: dict[str, str] = {}  # `_make_up` when the loop began
        self._gradients = GradientReducer(group)
        self._statistics = GlobalBatchStatistics(group)
        self._steering = Steering(group)

    def add(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """Add objects to the state, and return what the user works with; see `elastic.prepare`."""
        for obj in objects:  # before the optimizers, to know which of their parameters belong to no module
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
            self._steering.watch(obj)
            obj.register_step_post_hook(self._step_taken)
            self._loose += [parameter for parameter in parameters if self._gradients.watch(parameter)]
        self._stateful.append(obj)
        return obj

    def _add_module(self, module: torch.nn.Module) -> None:
        self._gradients.add(module)

    def loop_begins(self) -> None:
        """See `CommittableState`."""
        self._begun_as = self._make_up()

    def obstacle(self, lasting: bool = False) -> str | None:
        """See `CommittableState`."""
        if any(loader.kept for loader in self._loaders):
            return (
                "the loop keeps an iterator over a prepared DataLoader from one turn to the next: make a new one in "
                "each turn of elastic.epochs() to let the trial grow"
            )
        if self._gradients.captured:
            return CAPTURED
        now = self._make_up()
        if now != self._begun_as:
            changed = next(name for name in now if now[name] != self._begun_as.get(name))
            return (
                f"the loop has changed what it prepared: {changed} {self._begun_as.get(changed, 'nothing')} before, "
                f"{now[changed]} now; do that before elastic.epochs() to let the trial grow"
            )
        if not lasting and any(loader.undecided for loader in self._loaders):
            return "the loop has an iterator over a prepared DataLoader that it may keep"
        return None

    def _make_up(self) -> dict[str, str]:
        """By part, what another process must have of it to take the state over."""
        found = {"objects": str(len(self._stateful)), "DataLoaders": str(len(self._loaders))}
        for number, obj in enumerate(self._stateful):
            if isinstance(obj, torch.optim.Optimizer):
                sizes = [len(group["params"]) for group in obj.param_groups]
                found[f"optimizer {number}"] = f"param groups of {sizes} tensors"
            elif isinstance(obj, torch.nn.Module):
                parameters = list(obj.parameters())
                elements = sum(parameter.numel() for parameter in parameters)
                found[f"module {number}"] = f"{len(parameters)} parameters of {elements} elements"
        return found

    def facts(self, weights: bool) -> dict[str, float]:
        """See `CommittableState`."""
        optimizers = [obj for obj in self._stateful if isinstance(obj, torch.optim.Optimizer)]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        plain = [
            [len(group["params"]), *plain_leaves({name: v for name, v in group.items() if name != "params"})]
            for group in groups
        ]
        found = {
            "optimizer steps": float(self._steps),
            "batches": float(sum(loader.read for loader in self._loaders)),
            "learning rate": float(groups[0]["lr"]) if groups and "lr" in groups[0] else 0.0,
            "param groups": digest_of(plain),
            "schedulers": digest_of(plain_leaves([obj.state_dict() for obj in self._stateful if _steers(obj)])),
        }
        self._forget_turn()
        if weights:
            found["parameters"] = digest_of_tensors(self._gradients.parameters)
            found["buffers"] = digest_of_tensors(self._buffers())
        return found

    def take_over(self, backend: CollectiveBackend) -> float:
        """See `CommittableState`."""
        weights = [*self._gradients.parameters, *self._buffers()]
        before = [tensor.detach().clone() for tensor in weights]
        self.broadcast(backend)
        return distance_between(before, [tensor.detach() for tensor in weights])

    def _buffers(self) -> list[torch.Tensor]:
        """Those that a module saves; the others are nobody's state."""
        found = []
        for module in (obj for obj in self._stateful if isinstance(obj, torch.nn.Module)):
            saved = module.state_dict(keep_vars=True)
            found += [buffer for name, buffer in module.named_buffers() if name in saved]
        return found

    def _forget_turn(self) -> None:
        self._steps = 0
        self._steering.next_turn()
        for loader in self._loaders:
            loader.read = 0

    def _step_taken(self, *_: Any) -> None:
        self._steps += 1

    def set_width(self, width: int) -> None:
        """See `CommittableState`."""
        self._forget_turn()
        self._steering.restart()
        self._statistics.enable(width > 1)

    def capture(self) -> dict[str, Any]:
        """See `CommittableState`: a snapshot on the CPU."""
        state = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), self._view(), copy.deepcopy)
        state["streams"] = capture_streams(self._gpu)
        return state

    def load(self, state: dict[str, Any], *, with_streams: bool) -> None:
        """See `CommittableState`: the objects' tensors may be on any device.

        Raises:
            ValueError: it is the state of other objects than those that were prepared.
        """
        have, want = _counts(self._view()), _counts(state)
        if have != want:
            raise ValueError(
                f"this state is of other objects than elastic.prepare() got: it has {want}, the loop {have}; "
                "prepare the same objects in the same order in every worker and every run of a trial"
            )
        for obj, part in zip(self._stateful, state["stateful"], strict=True):
            obj.load_state_dict(part)
            if isinstance(obj, torch.optim.Optimizer):
                _keep_types(obj, part)
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
            restore_streams(state["streams"], self._gpu)

    def broadcast(self, backend: CollectiveBackend) -> None:
        """See `CommittableState`."""
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


def _keep_types(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    """Give the optimizer's state the types that it had in the optimizer that it is from.

    torch's `load_state_dict` casts it to the type of its parameter: a follower would round NAdam's ``mu_product``, a
    float32, in another way than its leader.
    """
    numbers = [number for group in loaded["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        for name, value in loaded["state"].get(number, {}).items():
            now = state.get(name)
            if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                state[name] = value.detach().to(now.device, copy=True)


def _steers(obj: Any) -> bool:
    """Whether it steers the training: a learning-rate scheduler or a gradient scaler."""
    return isinstance(obj, torch.optim.lr_scheduler.LRScheduler) or callable(getattr(obj, "unscale_", None))


def _counts(state: dict[str, Any]) -> dict[str, Any]:
    """The number of objects of each kind in a state, for the error when a state does not fit."""
    counts: dict[str, Any] = {name: len(state[name]) for name in ("stateful", "loose")}
    return {**counts, "generators": [len(found) for found in state["generators"]]}


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a tree that is sent without its tensors; ``offset`` and ``size`` in bytes."""

    piece: int
    offset: int
    size: int
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
    """The tree of rank 0, on every rank: its structure is sent as one object, its tensors as raw bytes in large pieces.

    Tensors on the backend's device are sent from there, those on the CPU from the CPU. No tensor is pickled.
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
        # A tensor of its own: Generator.set_state crashes on a tensor that does not begin at the start of its storage.
        return data.view(leaf.dtype).reshape(leaf.shape).clone()

    return map_tensors(lambda tensor: tensor, skeleton, pick)
