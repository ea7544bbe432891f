"""A copy of a trial's state that any process of the trial can read: its tensors on the CPU, and a pickle of all else.

A `state_dict` may hold anything: a lambda, an object of one of the script's classes, another scheduler with its
optimizer. Where it refers to what `elastic.prepare` got, or to a class that no import finds, the pickle has a name
in its place, and whoever reads it gets what its own process has by that name. So a scheduler steers the optimizer that
steps, and an enumeration's member is the one that the loop compares it with. A tensor is as it was: type, shape, order
in memory (strides), and what it shares with other tensors. Fused kernels pair elements by their place in memory.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from types import ModuleType
from typing import Any

import torch

from fluidtune.code_origin import is_importable
from fluidtune.device_kinds import TORCH_TYPES, on_accelerator

from ..references import dumped, loaded
from .plain_state import Drawing


@dataclass(frozen=True)
class Snapshot:
    """``skeleton``: the pickle. ``classes``: by module and name, those that no import finds, as bytes.

    ``tensors``: by number, copies on the CPU; ``on_gpu``: of the first, which are `placed`, whether each was on a GPU.
    """

    skeleton: bytes
    classes: dict[tuple[str, str], bytes]
    tensors: list[torch.Tensor]
    on_gpu: list[bool]


def taken(state: Any, prepared: Sequence[Any], pickling: ModuleType, placed: Sequence[Any] = ()) -> Snapshot:
    """The state as it is now. It raises what pickling the state raises.

    ``prepared``: the objects that have names, in the order in which the loop prepares them. ``pickling``: a module like
    `pickle`; that of the host also writes what is defined in the script itself. ``placed``: the parts of the state that
    come back to the GPU if they are on one.
    """
    names = _Names(prepared)
    skeleton = dumped((placed, names, state), names.name_of, pickling)
    classes = {name: pickling.dumps(each) for name, each in names.classes.items()}
    return Snapshot(skeleton, classes, copies(names.tensors), [*map(on_accelerator, names.tensors[: names.placed])])


def restored(
    snapshot: Snapshot, prepared: Sequence[Any], pickling: ModuleType, device: torch.device, like: Any = None
) -> Any:
    """The state, with what this process has by the names in it. ``prepared``, ``pickling``: see `taken`.

    ``device``: where the ``placed`` come that were on a GPU. ``like``: the state of this process, as it is now.

    Raises:
        ValueError: the loop has not prepared what the state refers to.
    """
    own = _Names(prepared)
    with suppress(Exception):  # what is behind something that cannot be pickled has no name
        dumped(([type(obj) for obj in prepared], like), own.name_of, pickling)
    tensors = copies(snapshot.tensors, [device if was else torch.device("cpu") for was in snapshot.on_gpu])

    def find(name: Any) -> Any:
        kind, *where = name
        if kind == "tensor":
            return tensors[where[0]]
        if kind == "end of the placed":
            return None
        if kind == "class":
            return own.classes.get((where[0], where[1])) or pickle.loads(snapshot.classes[where[0], where[1]])
        if where[0] >= len(prepared):
            raise ValueError(f"it refers to object {where[0] + 1} of elastic.prepare(), which got {len(prepared)}")
        owner = prepared[where[0]]
        if kind == "module":
            return owner.get_submodule(where[1])
        if kind == "parameter":
            return owner.get_parameter(where[1])
        return owner.generator if kind == "generator" else owner

    return loaded(snapshot.skeleton, find)[2]


class _Names:
    """What stands for objects in the pickle. It collects the ``tensors``, and the ``classes`` that no import finds.

    In the pickle it stands itself behind what is ``placed``, and so counts the tensors of that.
    """

    def __init__(self, prepared: Sequence[Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.placed = 0
        self.classes: dict[tuple[str, str], type] = {}
        #: By id, the names of tensors, of the prepared objects, and of the parts and parameters of modules.
        self._names: dict[int, tuple[Any, ...]] = {}
        for number, obj in enumerate(prepared):
            if isinstance(obj, torch.nn.Module):
                self._names |= {id(each): ("parameter", number, name) for name, each in obj.named_parameters()}
                self._names |= {id(part): ("module", number, name) for name, part in obj.named_modules()}
            if isinstance(obj, Drawing):
                self._names[id(obj.generator)] = ("generator", number)
            self._names[id(obj)] = ("object", number)

    def name_of(self, obj: Any) -> Any:
        if obj is self:
            self.placed = len(self.tensors)
            return ("end of the placed",)
        if id(obj) in self._names:
            return self._names[id(obj)]
        if isinstance(obj, torch.Tensor):
            self._names[id(obj)] = name = ("tensor", len(self.tensors))
            self.tensors.append(obj)
            return name
        if isinstance(obj, type) and not is_importable(obj):
            self.classes.setdefault((obj.__module__, obj.__qualname__), obj)
            return "class", obj.__module__, obj.__qualname__
        return None


def copies(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device] = ()) -> list[torch.Tensor]:
    """Copies, the first of them on these devices and the others on the CPU, without graphs and hooks.

    Memory that tensors of one type share, or of which they use at least half, is copied as one, so that they share it
    as before. Of other memory each tensor is copied by itself, so that the rest does not come along. Tensors of two
    types share nothing afterwards: `torch.save` refuses that.
    """
    used: defaultdict[tuple[int, torch.dtype], list[tuple[int, int]]] = defaultdict(list)
    memories: dict[tuple[int, torch.dtype], torch.UntypedStorage] = {}
    for tensor in tensors:
        if _lies_as_it_is(tensor) and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.storage_offset() * tensor.element_size()
            key = tensor.untyped_storage().data_ptr(), tensor.dtype
            used[key].append((begin, begin + (last + 1) * tensor.element_size()))
            memories[key] = tensor.untyped_storage()
    whole: dict[tuple[int, torch.dtype], torch.UntypedStorage] = {}
    for key, memory in memories.items():
        shared = any(end > begin for (_, end), (begin, _) in pairwise(sorted(used[key])))
        if shared or memory.nbytes() <= 2 * sum(end - begin for begin, end in used[key]):
            whole[key] = memory.cpu() if on_accelerator(memory) else memory.clone()
    found = []
    for tensor, device in zip_longest(tensors, devices, fillvalue=torch.device("cpu")):
        common = whole.get((tensor.untyped_storage().data_ptr(), tensor.dtype)) if _lies_as_it_is(tensor) else None
        if common is None:
            own = tensor.detach().to("cpu", copy=True)
        else:
            own = torch.empty(0, dtype=tensor.dtype)
            own.set_(common, tensor.storage_offset(), tensor.shape, tensor.stride())
        own = own.to(device)
        if isinstance(tensor, torch.nn.Parameter):
            own = torch.nn.Parameter(own, tensor.requires_grad)
        elif tensor.requires_grad and tensor.is_leaf:
            own.requires_grad_()
        found.append(own)
    return found


def _lies_as_it_is(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie in memory as they are."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in TORCH_TYPES
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )
