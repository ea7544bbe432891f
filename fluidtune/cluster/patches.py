"""Notices that a trial has replaced functions or classes of Python's own modules, of torch or of numpy.

Other code may hold the replacement by then, so it is not undone: the worker serves no further trial. What is compared
is what the modules' names, and the attributes of their classes, stand for; a change deep inside an object is not seen.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

#: The packages besides Python's own modules whose names are compared. Judgement: those that people patch. Modules with
#: a private name in their path are left out: torch has a thousand, which cost more than all the others.
_WATCHED = ("torch", "numpy")
#: Modules whose classes are compared too: their attributes are what people patch.
_CLASSES = ("builtins", "json", "logging", "socket", "subprocess", "threading", "torch")
_CLASS_PACKAGES = ("json.", "torch.nn.modules.", "torch.nn.parameter", "torch.optim.", "torch.utils.data.")
_MISSING = object()
#: What a constant is.
_PLAIN = (bool, int, float, str, bytes, tuple, type(None))


class Patches:
    """What the names of watched modules stood for when they were seen first."""

    def __init__(self) -> None:
        self._modules: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._classes: dict[type, dict[str, Any]] = {}
        #: What a trial had replaced when the import of a library began: where it is noted, its name, what it stood for.
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        self._note()

    def import_begins(self) -> None:
        """A library is about to be imported."""
        self._replaced = [(before, name, before.get(name, _MISSING)) for before, name, _ in self._changed()]

    def import_ended(self) -> None:
        """It was imported: what it has replaced belongs to the process from now on, and so do its modules."""
        for names, before in self._modules.values():
            _take(names, before)
        for each, before in self._classes.items():
            _take(vars(each), before)
        for before, name, was in self._replaced:
            if was is _MISSING:
                before.pop(name, None)
            else:
                before[name] = was
        self._note()

    def _note(self) -> None:
        for name, module in list(sys.modules.items()):
            if name in self._modules or not isinstance(module, ModuleType) or name == "__main__":
                continue
            top = name.partition(".")[0]
            if (top in _WATCHED and "._" not in name) or (top in sys.stdlib_module_names and top != "test"):
                names = vars(module)
                self._modules[name] = (names, dict(names))
                if name in _CLASSES or name.startswith(_CLASS_PACKAGES):
                    self._note_classes(name, names)

    def _note_classes(self, module: str, names: dict[str, Any]) -> None:
        for each in list(names.values()):
            if isinstance(each, type) and each.__module__ == module and each not in self._classes:
                self._classes[each] = dict(vars(each))

    def found(self) -> str | None:
        """What has been replaced, in words; None: nothing that is seen here."""
        changed = sorted(f"{owner}.{name}" for _, name, owner in self._changed())
        return f"patched: {', '.join(changed[:5])}" if changed else None

    def _changed(self) -> list[tuple[dict[str, Any], str, str]]:
        """What has been replaced: where it is noted, its name, and the module or class that it is a name of."""
        changed = []
        for module, (names, before) in self._modules.items():
            if not _is_same(names, before):  # most are, and this is done after each trial
                changed += [(before, name, module) for name in _changes(names, before, _top(module))]
        for each, before in self._classes.items():
            if not _is_same(vars(each), before):
                owner = f"{each.__module__}.{each.__qualname__}"
                changed += [(before, name, owner) for name in _changes(vars(each), before, _top(each.__module__))]
        return changed


def _take(names: Any, before: dict[str, Any]) -> None:
    """Let ``before`` be what the names stand for now."""
    if not _is_same(names, before):
        before.clear()
        before.update(names)


def _is_same(names: Any, before: dict[str, Any]) -> bool:
    """Whether the names stand for what they stood for; False where it is not easy to say."""
    try:
        return bool(names == before)  # compares by identity first, in C
    except Exception:
        return False  # an object that cannot be compared


def _top(module: str) -> str:
    return module.partition(".")[0]


def _changes(names: Any, before: dict[str, Any], package: str) -> list[str]:
    """The names of a module or class of ``package`` that were replaced. Harmless changes are noted in ``before``."""
    changed = []
    for name, value in list(names.items()):
        was = before.get(name, _MISSING)
        if value is was:
            continue
        if _is_patch(name, was, value, package):
            changed.append(name)
        else:
            before[name] = value
    for name in [each for each in before if each not in names]:
        if callable(before[name]) and not name.startswith("_"):
            changed.append(name)
        else:
            del before[name]
    return changed


def _is_patch(name: str, was: Any, value: Any, package: str) -> bool:
    """Whether a name that stood for ``was`` was replaced by somebody, and not by its own package at work."""
    if was is _MISSING and _top(str(getattr(value, "__module__", None))) == package:
        return False  # a name that the package loads late
    if was is _MISSING:
        # Modules that are imported late become names of their package, and modules keep private names of their own.
        return not isinstance(value, ModuleType) and (package == "builtins" or not name.startswith("_"))
    if callable(was):
        return (callable(value) or isinstance(value, _PLAIN)) and not _is_own_work(name, was, value, package)
    # A constant by its name; others are a module's own state.
    constant = name.isupper() and not name.startswith("_")
    return constant and isinstance(was, _PLAIN) and isinstance(value, _PLAIN) and was != value


def _is_own_work(name: str, was: Any, value: Any, package: str) -> bool:
    """Whether torch or numpy has put a wrapper around a function of its own, or replaced a private one by another."""
    code, names = getattr(value, "__code__", None), getattr(value, "__globals__", {})
    if package not in _WATCHED or code is None or _top(str(names.get("__name__"))) != package:
        return False
    if name.startswith("_") and not name.endswith("__"):
        return True
    held = (getattr(value, "__wrapped__", None), *(_content(cell) for cell in value.__closure__ or ()))
    return any(each is was for each in held)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # it is empty
