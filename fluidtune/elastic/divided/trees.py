"""A value as bytes and tensors: a pickle in which tensors have numbers, and so have classes that no import finds.

What a call is given, what it returns and modules themselves go so to another process, which makes the value of them
again, with these tensors or with others. So any structure can be cut and joined: dictionaries, dataclasses, a
framework's own outputs.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from fluidtune.code_origin import is_importable
from fluidtune.device_kinds import TORCH_TYPES

from ..references import dumped, loaded

#: Tensors of these classes are sent; a subclass may compute otherwise.
_KINDS = (torch.Tensor, torch.nn.Parameter)


class StaysWhole(Exception):
    """A module's calls, or those like one of them, stay whole; the message says why, in words of the user's."""


class Classes:
    """Classes that no import finds, as those of a script: by number, the same ones in the leader and its followers.

    A follower gets them by value, as bytes. The leader never makes one of bytes: unpickling a class would give it other
    methods. ``pickling``: a module like `pickle`.
    """

    def __init__(self, pickling: ModuleType = pickle) -> None:
        self.pickling = pickling
        self._known: list[type] = []
        self._numbers: dict[type, int] = {}

    def number(self, obj: Any) -> Any:
        """What stands for the object in bytes, if it is such a class; else None. A new one is added."""
        if not isinstance(obj, type) or is_importable(obj):
            return None
        if obj not in self._numbers:
            self._numbers[obj] = len(self._known)
            self._known.append(obj)
        return "class", self._numbers[obj]

    def find(self, number: Any) -> type:
        return self._known[number[1]]

    def __len__(self) -> int:
        return len(self._known)

    def forget(self, count: int) -> None:
        """A follower: know the first ``count`` ones only; the others have other numbers in the leader."""
        del self._known[count:]
        self._numbers = {cls: number for number, cls in enumerate(self._known)}

    def dumped(self) -> bytes:
        """All of them, as they are now with the global variables that they name."""
        return self.pickling.dumps(tuple(self._known)) if self._known else b""

    def take(self, data: bytes) -> None:
        """A follower: what the leader has dumped."""
        if data:
            self._known = list(pickle.loads(data))
            self.forget(len(self._known))


@dataclass(frozen=True)
class Tree:
    """A value as bytes and tensors. ``classes``: those of the trial."""

    skeleton: bytes
    tensors: tuple[torch.Tensor, ...]
    classes: Classes

    def value(self, tensors: Sequence[torch.Tensor] | None = None) -> Any:
        """The value, with these tensors in the places of its own."""
        found = self.tensors if tensors is None else tensors
        return loaded(
            self.skeleton, lambda number: found[number] if isinstance(number, int) else self.classes.find(number)
        )


def tree_of(value: Any, what: str, classes: Classes, by_name: bool = True) -> Tree:
    """``what``: "it", "its inputs" or "its output", for an error. ``by_name``: functions of the script may be.

    Raises:
        StaysWhole: it cannot be handed on.
    """
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def number(obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return classes.number(obj)
        if id(obj) not in numbers:
            if type(obj) not in _KINDS or obj.layout is not torch.strided or obj.is_quantized:
                raise StaysWhole(f"{what} has a tensor of another kind ({type(obj).__name__}, {obj.layout})")
            if obj.device.type not in TORCH_TYPES:
                raise StaysWhole(f"{what} has a tensor on {obj.device}")
            numbers[id(obj)] = len(tensors)
            tensors.append(obj)
        return numbers[id(obj)]

    for each in (pickle, classes.pickling) if by_name else (classes.pickling,):
        tensors.clear()
        numbers.clear()
        try:
            return Tree(dumped(value, number, each), tuple(tensors), classes)
        except StaysWhole:
            raise
        except Exception as error:
            failed = error
    raise StaysWhole(f"{what} cannot be pickled ({type(failed).__name__}: {failed})") from failed


def same_but_tensors(one: Tree, other: Tree) -> bool:
    """Whether two values are equal but for what is in their tensors."""
    if one.skeleton == other.skeleton:
        return True
    try:  # the pickles of two processes may differ in what they say twice
        found = [tree.value([("tensor", place) for place in range(len(tree.tensors))]) for tree in (one, other)]  # type: ignore[arg-type, misc]
        return bool(found[0] == found[1]) and type(found[0]) is type(found[1])
    except Exception:
        return False
