"""Collective backends: one contract (`base`), one module per library."""

from .base import Address, CollectiveBackend
from .horovod_backend import HorovodBackend
from .torch_backend import TorchBackend

#: By the name that `FluidExecutor(backend=...)` takes.
BACKENDS: dict[str, type[CollectiveBackend]] = {"torch": TorchBackend, "horovod": HorovodBackend}

__all__ = ["BACKENDS", "Address", "CollectiveBackend", "HorovodBackend", "TorchBackend"]
