"""Pickles in which references stand for some objects, such as tensors and classes of the script."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn


def dumped(value: Any, refer: Callable[[Any], Any], pickling: ModuleType) -> bytes:
    """``value`` as bytes. ``refer``: the reference that stands for an object in them; None: its pickle does.

    ``pickling``: a module like `pickle`.

    Modules are pickled as torch's are, by their attributes, also those of a framework that would save a file.
    """
    base = getattr(pickling, "CloudPickler", None) or pickling.Pickler

    def reduced(self: Any, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and type(obj).__reduce__ is not object.__reduce__:
            return _new, (type(obj),), obj.__getstate__()
        for kind in (list, dict, set):  # one that has attributes may need them before it gets its elements
            if isinstance(obj, kind) and type(obj) not in (kind, OrderedDict) and getattr(obj, "__dict__", None):
                return _new, (type(obj),), (dict(vars(obj)), kind(obj)), None, None, _fill
        return base.reducer_override(self, obj) if hasattr(base, "reducer_override") else NotImplemented

    methods = {"persistent_id": lambda self, obj: refer(obj), "reducer_override": reduced}
    buffer = io.BytesIO()
    type("Referring", (base,), methods)(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def _new(cls: type) -> Any:
    return cls.__new__(cls)  # type: ignore[call-overload]


def _fill(made: Any, state: Any) -> None:
    """Give a container of a class of its own its attributes, then its elements."""
    vars(made).update(state[0])
    if isinstance(made, list):
        list.extend(made, state[1])
    elif isinstance(made, OrderedDict):  # `dict.update` would leave its order empty
        for key, value in state[1].items():
            OrderedDict.__setitem__(made, key, value)
    else:
        (dict if isinstance(made, dict) else set).update(made, state[1])


def loaded(data: bytes, find: Callable[[Any], Any]) -> Any:
    """The value of `dumped`. ``find``: the object that a reference stands for."""
    unpickler = type("Finding", (pickle.Unpickler,), {"persistent_load": lambda self, reference: find(reference)})
    return unpickler(io.BytesIO(data)).load()
