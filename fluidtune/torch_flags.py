"""Reads and sets flags of torch.backends by their dotted names, such as ``cuda.matmul.allow_tf32``.

``backends`` is that module: this one does not import torch.
"""

from __future__ import annotations

from typing import Any


def flag(backends: Any, name: str) -> Any:
    """What the flag is; None: this release has not got it, or it cannot be read now."""
    found = backends
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        # RuntimeError: an older name of what was set by a newer one.
        return None
    return found


def set_flag(backends: Any, name: str, value: Any) -> None:
    """Set the flag to what `flag` has returned; None: it stays as it is."""
    if value is None:
        return
    *owners, last = name.split(".")
    owner = backends
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, last, value)
