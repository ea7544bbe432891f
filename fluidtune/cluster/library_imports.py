"""Tells what a library does while it is imported from what a trial does.

A library stays imported when the trial ends, so what its import has changed must stay too: filters of warnings,
handlers at exit, loggers. A module of the user's own does not stay: in a new process it would be imported anew. So
`LibraryImports` says when the import of a library begins and ends, and which modules are a library's. It decides
nothing else.
"""

from __future__ import annotations

import importlib.machinery
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

#: Packages that FluidTune needs. They are libraries wherever they are, as in a checkout.
_OURS = ("fluidtune", "themis_bridge", "salus_share", "ray", "torch", "numpy")
#: The last part of a folder that holds installed packages: CPython's and Debian's names.
_SITES = ("site-packages", "dist-packages")


def _folders() -> tuple[str, ...]:
    """The folders that hold libraries: Python's own, installed packages, and packages that FluidTune needs."""
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib") if name in paths}
    found |= {*site.getsitepackages(), site.getusersitepackages()}
    for name in _OURS:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file:
            found.add(str(Path(file).parent))
    return tuple(sorted({os.path.join(folder, "") for each in found for folder in (each, os.path.realpath(each))}))


class Libraries:
    """Which code is a library's. Everything else is the user's."""

    def __init__(self) -> None:
        self._folders = _folders()
        self._known: dict[str, bool] = {}

    def has_file(self, path: str) -> bool:
        """Whether a library's code is in this file."""
        known = self._known.get(path)
        if known is None:
            known = path.startswith(("<frozen ", *self._folders)) or any(f"{os.sep}{s}{os.sep}" in path for s in _SITES)
            self._known[path] = known
        return known

    def has_code(self, code: CodeType) -> bool:
        """Whether the code is a library's. Code that was made from text is its maker's, who is not known here."""
        return self.has_file(code.co_filename)

    def has_module(self, module: ModuleType) -> bool:
        """Whether the module is a library's: by its file, or else by the package that it is in."""
        spec = getattr(module, "__spec__", None)
        file = getattr(module, "__file__", None) or getattr(spec, "origin", None)
        if file in ("built-in", "frozen"):
            return True
        if file and os.path.isabs(file):  # a module that code makes, as torch makes torch.ops, may give a name alone
            return self.has_file(file)
        folders = [] if file else list(getattr(module, "__path__", ()))
        if folders:
            return all(self.has_file(os.path.join(folder, "")) for folder in folders)
        top = sys.modules.get(module.__name__.partition(".")[0])
        return top is not None and top is not module and self.has_module(top)


class LibraryImports:
    """A finder in front of all others that calls ``begin`` before a library is imported and ``end`` after.

    ``end`` gets the name of the module, and whether its code ran to its end. What is imported by a library's import is
    part of it: there are no calls for that. The standard library is not watched.
    """

    def __init__(self, libraries: Libraries, begin: Callable[[], None], end: Callable[[str, bool], None]):
        self._libraries = libraries
        self._begin = begin
        self._end = end
        self._within = threading.local()

    def install(self) -> None:
        """Watch imports from now on."""
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """The module's spec with a loader that calls back; None: the other finders find it as always."""
        if getattr(self._within, "import_", False) or name.partition(".")[0] in sys.stdlib_module_names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if spec is None or not spec.origin or not hasattr(loader, "__dict__") or not hasattr(loader, "exec_module"):
            return None
        if not self._libraries.has_file(spec.origin):
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is as the other finders would have made it
            if getattr(self._within, "import_", False):
                execute(module)
                return
            self._within.import_ = True
            complete = False
            try:
                self._begin()
                execute(module)
                complete = True
            finally:
                try:
                    self._end(name, complete)
                finally:
                    self._within.import_ = False

        loader.exec_module = exec_module
        return spec


def is_imported(module: ModuleType) -> bool:
    """Whether no thread is importing the module just now. Python's import system keeps that in the module's spec."""
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)


def importing(frame: FrameType | None) -> bool:
    """Whether the frame's code runs because a module is being imported."""
    while frame is not None:
        if frame.f_code.co_name == "_call_with_frames_removed" and frame.f_code.co_filename.startswith(
            "<frozen importlib"
        ):
            return True
        frame = frame.f_back
    return False
