"""Tells by which functions the same data are loaded, in all processes of a job.

Two functions are one if their module, name and code are equal, and the values that they enclose or are given. Pickles
of whole functions would not do: they differ with the order of sets, and with which equal strings are one object.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

from ray import cloudpickle


def identity(load: Callable[[], Any]) -> bytes:
    """32 bytes that are equal for functions that load the same data.

    Raises:
        Exception: what pickle raises for a value that the function encloses or is given.
    """
    return hashlib.sha256(repr(_said(load, ())).encode()).digest()


def _said(value: Any, within: tuple[Any, ...]) -> Any:
    """What is equal for equal values. ``within``: the values that this one is a part of, from the outermost on."""
    for depth, each in enumerate(within):
        if each is value:
            return "itself", depth  # a function that calls itself
    parts: tuple[Any, ...]
    if isinstance(value, functools.partial):
        parts = value.func, value.args, *sorted(value.keywords.items())
    elif isinstance(value, FunctionType):
        defaults = value.__defaults__, *sorted((value.__kwdefaults__ or {}).items())
        parts = value.__module__, value.__qualname__, value.__code__, value.__closure__, defaults
    elif isinstance(value, CodeType):
        parts = value.co_code, value.co_names, value.co_consts
    elif isinstance(value, CellType):
        parts = () if value == CellType() else (value.cell_contents,)
    elif type(value) is tuple:
        parts = value
    elif isinstance(value, set | frozenset):
        return sorted(repr(_said(each, within)) for each in value)
    else:
        return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()
    return type(value).__name__, [_said(part, (*within, value)) for part in parts]
