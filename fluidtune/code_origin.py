"""Where code comes from: from an installed package, which no script changes, or from the script itself."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any


def is_installed(module: ModuleType) -> bool:
    """By where its file is. A lazy module is not loaded by that."""
    return str(object.__getattribute__(module, "__dict__").get("__file__")).startswith(_folders(tuple(sys.path)))


def is_importable(cls: type) -> bool:
    """Whether another process finds the class under its name: one of the script itself it does not."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls


@functools.lru_cache(maxsize=1)
def _folders(path: tuple[str, ...]) -> tuple[str, ...]:
    places = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    places |= {place for place in path if Path(place).name in ("site-packages", "dist-packages")}
    return tuple(os.path.join(each, "") for place in places for each in {place, os.path.realpath(place)})
