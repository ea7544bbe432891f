"""Collective backends: one contract (`base`), one module per library, which is loaded when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import CollectiveBackend
    from .horovod_backend import HorovodBackend
    from .torch_backend import TorchBackend

#: By the name that `FluidExecutor(backend=...)` takes: the class.
BACKENDS = {"torch": "TorchBackend", "horovod": "HorovodBackend"}

__all__ = ["BACKENDS", "CollectiveBackend", "HorovodBackend", "TorchBackend", "backend_class"]

_HOMES = {"CollectiveBackend": "base", "HorovodBackend": "horovod_backend", "TorchBackend": "torch_backend"}


def backend_class(name: str) -> type[CollectiveBackend]:
    """The backend of this name, one of `BACKENDS`."""
    found: type[CollectiveBackend] = __getattr__(BACKENDS[name])
    return found


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
