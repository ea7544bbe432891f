"""Notices that a function, a class or a plain value of Python's own modules or of a library was replaced.

Other code may hold the replacement by then, so it is not undone. What is compared is what the names of modules, and the
attributes of classes, stand for. Each object that is compared costs a forked process the memory page that it is on,
because Python counts references there; so the main modules of libraries are compared, and few classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

#: The modules of libraries that are compared.
_MODULES = {
    *("numpy", "numpy.random", "numpy.linalg", "pandas", "sklearn", "matplotlib", "matplotlib.pyplot", "ray"),
    *("ray.tune", "ray.train", "torch", "torch.autograd", "torch.nn.functional", "torch.nn.init"),
}
#: Modules whose classes are compared as well.
_CLASSES = {
    *("json", "logging", "socket", "subprocess", "threading", "pandas.core.frame", "sklearn.base"),
    *("torch._tensor", "torch.nn", "torch.optim", "torch.utils.data"),
}
_MISSING = object()
#: What a plain value is.
_PLAIN = (bool, int, float, str, bytes, tuple, type(None))
#: Names that are not compared. tempfile's is looked up at first use, and put back by `process_settings`. The others are
#: the last error that was printed.
_NOT_COMPARED = {("tempfile", "tempdir"), *(("sys", f"last_{each}") for each in ("type", "value", "traceback", "exc"))}


class Patches:
    """What names stood for. ``names``: all imported modules; ``find`` returns one by its name."""

    def __init__(self, names: set[str], find: Callable[[str], Any]) -> None:
        self._spaces: list[tuple[str, Mapping[str, Any], dict[str, Any]]] = []
        pythons = {name for name in names if name in sys.stdlib_module_names and not name.startswith("_")}
        for name in sorted(pythons | _MODULES | _CLASSES):
            module = find(name)
            if module is not None:
                values = list(vars(module).values()) if name in _CLASSES else []
                own = {each for each in values if issubclass(type(each), type) and _top(each.__module__) == _top(name)}
                spaces = {name: vars(module), **{f"{each.__module__}.{each.__qualname__}": vars(each) for each in own}}
                self._spaces += [(owner, names, dict(names)) for owner, names in spaces.items()]

    def found(self) -> str | None:
        """What has been replaced, in words; None: nothing that is seen here."""
        changed = [f"{owner}.{name}" for owner, names, was in self._spaces for name in _changes(owner, names, was)]
        return f"patched: {', '.join(changed[:5])}" if changed else None


def _changes(owner: str, names: Mapping[str, Any], before: dict[str, Any]) -> list[str]:
    try:
        if names == before:  # compares by identity first, in C
            return []
    except Exception:
        pass  # an object that cannot be compared
    package = _top(owner)
    gone = [name for name, was in before.items() if name not in names and callable(was) and not name.startswith("_")]
    return gone + [
        name
        for name, value in list(names.items())
        if value is not (was := before.get(name, _MISSING)) and (owner, name) not in _NOT_COMPARED
        if _is_patch(name, was, value, package)
    ]


def _is_patch(name: str, was: Any, value: Any, package: str) -> bool:
    """Whether a name that stood for ``was`` was replaced by somebody, and not by its own package at work."""
    if was is _MISSING:
        # Packages load modules and names late, and modules keep private names of their own.
        own = isinstance(value, ModuleType) or _top(str(getattr(value, "__module__", None))) == package
        return not own and (package == "builtins" or not name.startswith("_"))
    if isinstance(was, _PLAIN):
        return isinstance(value, _PLAIN) and was != value and not name.startswith("_")
    return (callable(was) or isinstance(was, (property, classmethod, staticmethod))) and not _wraps(value, was, package)


def _wraps(value: Any, was: Any, package: str) -> bool:
    """Whether the package has put one of its functions around ``was``, as torch does when one is used first."""
    if _top(str(getattr(value, "__globals__", {}).get("__name__"))) != package or package in sys.stdlib_module_names:
        return False
    try:
        held = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    except ValueError:
        return False  # an empty cell
    return any(each is was for each in (getattr(value, "__wrapped__", None), *held))


def _top(name: str) -> str:
    return name.partition(".")[0]
