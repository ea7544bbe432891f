"""Modules that load themselves when they are first used, as `importlib.util.LazyLoader` makes them.

Whoever reads any attribute of such a module loads it. So the variables of modules are read past it here.
"""

from __future__ import annotations

from typing import Any


def variables(module: Any) -> dict[str, Any]:
    """The variables of what is in `sys.modules`, which does not load it. Empty where it has none."""
    try:
        found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return found
