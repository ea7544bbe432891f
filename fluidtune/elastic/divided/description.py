"""A module as it is, from which another process makes a replica; and whether it has changed since.

What a loop may change of a module between two calls is compared at each call, by identity: attributes of all of its
modules (``training`` is one), the tensors' types and whether they are trained. What can change without another
identity, as a list or a configuration object, is compared by its pickle. So are global variables that the module's
methods name.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import operator
import pickle
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fluidtune.code_origin import is_installed
from fluidtune.device_kinds import on_accelerator

from ..references import dumped
from .torch_private import ANSWER, answering, buffers_of, modules_of, parameters_of, tables_of, version
from .trees import Classes, StaysWhole, tree_of

#: What cannot change without another identity.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
_NAMED = (types.FunctionType, types.BuiltinFunctionType, type, ModuleType)
#: Of each module, the dictionaries that torch keeps in it.
_HELD = ("_parameters", "_buffers", "_modules")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
#: A cell of a variable that is not set.
_EMPTY = types.CellType()
#: Packages whose functions no script changes the global variables of.
_LIBRARIES = ("torch", "numpy", "builtins")


class Nothing:
    """What stands in a module's dictionary for FluidTune's own sake, and belongs into no copy of the module."""

    def __reduce__(self) -> Any:
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> None:
        return None


class Description:
    """A module as it is now. ``classes``: those of the trial.

    ``tree``: from which replicas are made; ``digest``: of its bytes and of the classes. ``tensors``: by number.

    Raises:
        StaysWhole: no other process can have it.
    """

    def __init__(self, module: nn.Module, classes: Classes) -> None:
        _refuse_module(module)
        self.tree = tree_of(module, "it", classes, by_name=False)
        self.tensors = self.tree.tensors
        if any(not tensor.is_leaf for tensor in self.tensors):
            raise StaysWhole("it has a tensor that was computed from others with a gradient")
        numbers = set(map(id, self.tensors))
        if any(id(parameter) not in numbers for parameter in parameters_of(module)):
            raise StaysWhole("its pickle leaves weights out")
        self._kinds = self._kinds_now()
        self.classes = classes.dumped()
        kinds = repr([(kind[:2], kind[3:]) for kind in self._kinds]).encode()
        self._watch = Watch(module, classes.pickling)
        # A follower has a class that it imports as it was imported: the check tells whether that is how it is here.
        self.digest = hashlib.sha1(self.tree.skeleton + self.classes + kinds + self._watch.outside).digest()

    def _kinds_now(self) -> list[Any]:
        return [(t.dtype, t.shape, t.device, t.requires_grad, t.is_leaf) for t in self.tensors]

    @property
    def device(self) -> torch.device | None:
        """The GPU of its tensors; None: it has none on a GPU."""
        return next((t.device for t in self.tensors if on_accelerator(t)), None)

    @property
    def trained(self) -> list[int]:
        """The numbers of the tensors that get gradients."""
        return [number for number, tensor in enumerate(self.tensors) if tensor.requires_grad]

    def has_tensors_of(self, other: Description) -> bool:
        """Whether both have the same tensors, so that weights that were sent are of use."""
        return self._kinds == other._kinds and all(map(operator.is_, self.tensors, other.tensors))

    def holds(self) -> bool:
        """Whether the module is still as it is described here."""
        return self._kinds == self._kinds_now() and self._watch.holds()


def _refuse_module(module: nn.Module) -> None:
    """StaysWhole: it is of a kind that is called in another way, or has hooks."""
    for each in modules_of(module):
        if isinstance(each, torch.jit.ScriptModule):
            raise StaysWhole("it is a script of torch.jit")
        if isinstance(each, nn.parallel.DistributedDataParallel | nn.DataParallel) or "fsdp" in type(each).__module__:
            raise StaysWhole(f"{type(each).__name__} divides it already")
        other = None if each is module else answering(each)
        if type(each).__name__ == "OptimizedModule" or not isinstance(other, Nothing | None):
            raise StaysWhole("it is compiled")
        if any(each.__dict__.get(name) for name in _HOOKS):
            raise StaysWhole(f"{type(each).__name__} has hooks")
    cards = {t.device for t in (*parameters_of(module), *buffers_of(module)) if on_accelerator(t)}
    if len(cards) > 1:
        raise StaysWhole("its tensors are on several GPUs")


def statistics_of(layer: nn.Module) -> list[torch.Tensor]:
    """The running statistics of a batch normalisation, but no buffer that a class of the script has added to it."""
    names = ("running_mean", "running_var", "num_batches_tracked") if isinstance(layer, _BatchNorm) else ()
    return [buffer for name in names if (buffer := tables_of(layer)[2].get(name)) is not None]


class Marks:
    """By what one sees, after a call of a replica, that the call has left something behind in it."""

    def __init__(self, module: nn.Module) -> None:
        modules = modules_of(module)
        self._tables = [(t, dict(t)) for each in modules for t in tables_of(each)]
        held = (b for m in modules for b in tables_of(m)[2].values() if all(b is not each for each in statistics_of(m)))
        self._buffers = [buffer for buffer in held if buffer is not None]
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [0 if buffer.is_inference() else version(buffer) for buffer in self._buffers]

    def put_back(self) -> bool:
        """Put attributes back as they were. Whether anything was changed."""
        versions, self._versions = self._versions, self._versions_now()
        changed = versions != self._versions
        for table, kept in self._tables:
            if _are(table.values(), kept.values()):
                continue
            if any(not _is_same(table.get(name), kept.get(name)) for name in {*table, *kept} - {ANSWER}):
                changed = True
            table.clear()
            table.update(kept)
        return changed


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, (*_PLAIN, tuple)) and repr(one) == repr(other))


class Watch:
    """What can change of a module between two calls."""

    def __init__(self, module: nn.Module, pickling: ModuleType) -> None:
        self._pickling = pickling
        modules = modules_of(module)
        self._modules = {id(each) for each in modules}
        self._tables: list[tuple[Reader, list[Any]]] = []
        self._hooks: list[Any] = []
        self._mutable: list[Any] = []
        for each in modules:
            own = each.__dict__
            self._tables.append((own.values, list(own.values())))
            for name, value in own.items():
                if name in _HELD:
                    self._tables.append((value.values, list(value.values())))
                elif name in _HOOKS:
                    self._hooks.append(value)
                elif not name.startswith("_forward_") and not self._is_known(value):
                    self._mutable.append(value)
        bases = {base for each in modules for base in type(each).__mro__ if not _is_library(base.__module__)}
        self._tables += [(vars(base).values, list(vars(base).values())) for base in bases]
        functions = [function for base in bases for function in vars(base).values()]
        functions += [value for each in modules for value in each.__dict__.values()]
        named = _outside_of(functions)
        self._tables += [(read, read()) for read in named]
        self._outside = [*map(_of_class, bases), *named]
        outside = [value for read in self._outside for value in read()]
        self._mutable += [value for value in outside if not self._is_known(value) or isinstance(value, torch.Tensor)]
        self._mutable = [value for value in self._mutable if not (isinstance(value, dict | list | set) and not value)]
        self._empty = [
            value for _, kept in self._tables for value in kept if isinstance(value, list | set) and not value
        ]
        self._looks = self._pickled(self._mutable)
        #: What methods read outside of the module, as bytes.
        self.outside = self._outside_now()

    def _is_known(self, value: Any) -> bool:
        if isinstance(value, (*_PLAIN, *_NAMED, torch.Tensor, Nothing)) or id(value) in self._modules:
            return True
        return isinstance(value, tuple) and all(self._is_known(each) for each in value)

    def _pickled(self, values: list[Any]) -> bytes:
        if not values:
            return b""

        def number(obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                return id(obj), version(obj)
            return id(obj) if id(obj) in self._modules else None

        try:
            return dumped(values, number, pickle)
        except Exception:
            try:
                return dumped(values, number, self._pickling)
            except Exception:
                if len(values) == 1:
                    return repr(values).encode()
                return b"".join(self._pickled([value]) for value in values)

    def leaves_outside(self) -> bool:
        """Whether what methods read outside of the module has changed."""
        return self._outside_now() != self.outside

    def _outside_now(self) -> bytes:
        values = [value for read in self._outside for value in read()]
        return self._pickled([value for value in values if not isinstance(value, _NAMED)])

    def holds(self) -> bool:
        """Whether nothing has changed."""
        if any(self._hooks) or any(self._empty):
            return False
        return all(_are(read(), kept) for read, kept in self._tables) and self._pickled(self._mutable) == self._looks


def _is_library(module: str | None) -> bool:
    name = (module or "").partition(".")[0]
    return name in _LIBRARIES or (name in sys.stdlib_module_names and name != "__main__")


@functools.cache
def _is_installed(package: str) -> bool:
    """Whether it is a library or an installed package: no script changes what its functions name."""
    module = sys.modules.get(package)
    return _is_library(package) or (module is not None and is_installed(module))


#: Returns the values of some variables as they are now, in the same order each time.
Reader = Callable[[], Any]


def _variables(table: Mapping[str, Any], names: Sequence[str]) -> Reader:
    return lambda: [table.get(name) for name in names]


def _enclosed(cells: Sequence[types.CellType]) -> Reader:
    return lambda: [None if cell == _EMPTY else cell.cell_contents for cell in cells]


def _defaults(function: types.FunctionType) -> Reader:
    return lambda: function.__defaults__ or ()


def _of_class(cls: type) -> Reader:
    """What is no method of a class."""
    own = vars(cls)
    names = [name for name, each in own.items() if not callable(each) and name[:2] != "__" and name != "_abc_impl"]
    return _variables(own, names)


def _are(one: Collection[Any], other: Collection[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _outside_of(values: Iterable[Any]) -> list[Reader]:
    """Variables outside of these functions, and of functions that they name, that they read."""
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    others: list[Reader] = []
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        function = waiting.pop()
        if isinstance(function, types.MethodType | staticmethod | classmethod):
            function = function.__func__
        if not isinstance(function, types.FunctionType | type) or id(function) in seen:
            continue
        seen.add(id(function))
        if _is_installed((function.__module__ or "").partition(".")[0]):
            continue
        if isinstance(function, type):
            if not issubclass(function, enum.Enum):
                others.append(_of_class(function))
            continue
        names = _names_in(function.__code__)
        tables = [function.__globals__]
        while tables:
            table = tables.pop()
            for name in names.intersection(table):
                value = table[name]
                if isinstance(value, ModuleType):  # its variables may be read as its attributes
                    if id(value) not in seen and not _is_installed(value.__name__.partition(".")[0]):
                        seen.add(id(value))
                        tables.append(vars(value))
                elif not isinstance(value, types.BuiltinFunctionType):
                    waiting.append(value)
                    found.setdefault(id(table), (table, set()))[1].add(name)
        if function.__closure__:
            others.append(_enclosed(function.__closure__))
            waiting += others[-1]()
        for kept in (function.__kwdefaults__, function.__dict__):
            if kept:
                others.append(_variables(kept, list(kept)))
        if function.__defaults__:
            others.append(_defaults(function))
    return [*(_variables(table, sorted(names)) for table, names in found.values()), *others]


def _names_in(code: types.CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*(_names_in(each) for each in inner))
