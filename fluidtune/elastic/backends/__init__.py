"""Collective backends: one contract (`base`), one module per library."""

from .base import Address, CollectiveBackend
from .torch_backend import TorchBackend

__all__ = ["Address", "CollectiveBackend", "TorchBackend"]
