"""How the workers of an elastic trial find each other and exchange tensors.

Start with `base`, the contract of a collective backend and the rendezvous that all libraries share. `torch_backend` and
`horovod_backend` are the libraries, each loaded when it is first asked for. `membership` names a group's workers and
where they meet; `trees` sends nested tensors; `signing` tells the trial's own words from a stranger's. `liveness` sees
which workers live, `lockstep` which collective each is in, and `rendezvous` is Horovod's. Which workers form a group,
and when, is decided in `group`.
"""

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
