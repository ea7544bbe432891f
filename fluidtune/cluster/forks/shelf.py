"""The shelf: modules that a fork server has imported, out of sight in its children until they import them.

A new process has not imported what its trial has not imported yet. So a child sees none of the server's modules, and
gets one when its own code imports it, together with those that this module had imported. That is right only if an
import would have given the same now. What it can depend on was written down in the server: the environment variables
that were read, and the file of the package. Where one of them differs now, the module is imported from its file
instead; a package with compiled parts cannot be imported twice in a process, so there the process must be a plain one
(`NeedsPlainProcess`).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from inspect import isfunction
from types import ModuleType
from typing import Any, TypeVar

from fluidtune.ray_compat.worker_program import READ_LATER

_Actor = TypeVar("_Actor")

#: How the names of environment variables begin that compiled code reads when it is loaded: OpenMP's, MKL's and
#: OpenBLAS' documented ones, the allocators', torch's and Arrow's. CUDA and NCCL read theirs at first use.
NATIVE: tuple[str, ...] = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "TBB_"),
    *("MALLOC_", "JE_", "JEMALLOC_", "MIMALLOC_", "TORCH_", "PYTORCH_", "ATEN_", "ARROW_"),
)
#: What Ray and the shell give each process anew, and what is read only later. What was imported need not be imported
#: anew if they differ.
OF_THE_PROCESS = {"SPT_NOENV", "SHLVL", "_", "PWD", "OLDPWD", "PYTHONBREAKPOINT", "FLUIDTUNE_EMULATED_DEVICE"}
OF_THE_PROCESS |= {"PYTORCH_NVML_BASED_CUDA_CHECK", *READ_LATER}


def variables(module: Any) -> dict[str, Any]:
    """The variables of what is in `sys.modules`; empty where it has none.

    They are read past a module of `importlib.util.LazyLoader`, which is loaded when any attribute of it is read.
    """
    try:
        found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return found


class NeedsPlainProcess(BaseException):
    """A forked process cannot be what a new one would be. No `Exception`: code that tries imports must not go on."""

    @classmethod
    def said_by(cls, error: BaseException) -> str | None:
        """The reason, if Ray hands on such an error of another process, or has ended the process for it.

        None: the error is another one.
        """
        _, found, after = str(error).partition(f"{cls.__qualname__}: ")
        return after.splitlines()[0] if found else None

    @classmethod
    @contextmanager
    def handed_on(cls) -> Iterator[None]:
        """Such an error inside becomes one that Ray hands on to the caller, for whom `said_by` is."""
        try:
            yield
        except cls as needs:
            raise RuntimeError(f"{cls.__module__}.{cls.__qualname__}: {needs}") from None

    @classmethod
    def handed_on_by(cls, actor: type[_Actor]) -> type[_Actor]:
        """Decorate an actor class: `handed_on` holds for all that others can call."""
        for name, method in list(vars(actor).items()):
            if isfunction(method) and (name == "__init__" or not name.startswith("_")):
                setattr(actor, name, cls.handed_on()(method))
        return actor


class Entry:
    """One module, and what its import has depended on.

    ``needs``: the names of the modules that it imported. ``read``: the environment variables that it read, each with
    its value; None: it was not set. ``wrote``: those that it set; None: it has removed it. ``anew``: what a child does
    when it imports the module, so that it has alone what it would have alone; None: nothing. ``displaced``: what its
    package had by its name before, such as an object that imports it when it is used; None: nothing.
    """

    # A child writes to the pages of what it only looks at, because Python counts references there. So what a child
    # looks at lies together: entries have no dictionaries, and names of their own.
    __slots__ = ("anew", "compiled", "displaced", "module", "name", "needs", "read", "wrote")

    def __init__(
        self,
        name: str,
        module: ModuleType,
        needs: Iterable[str],
        read: Mapping[str, str | None],
        wrote: Mapping[str, str | None],
        anew: Callable[[], None] | None = None,
        displaced: Any = None,
    ) -> None:
        self.name = name.encode().decode()
        self.module = module
        self.needs = set(needs)
        self.read, self.wrote = tuple(read.items()), tuple(wrote.items())
        self.anew = anew
        self.displaced = displaced
        file = variables(module).get("__file__") or ""
        #: Whether it was loaded from a compiled file of an installed package.
        self.compiled = file.endswith((".so", ".pyd", ".dylib")) and "lib-dynload" not in file

    @property
    def package(self) -> str:
        """The name of the outermost package that it is in."""
        return self.name.partition(".")[0]


class Shelf:
    """All entries by name. A finder in front of all others, once it is in `sys.meta_path`.

    ``environment``: what the modules were imported with.
    """

    def __init__(self, entries: Iterable[Entry], environment: Mapping[str, str]) -> None:
        self._entries: dict[str, Entry] = {}
        #: Packages with compiled parts.
        self._compiled: set[str] = set()
        #: What compiled code can have read when it was loaded.
        self._environment = dict(environment)
        self._not_native = set(OF_THE_PROCESS)
        #: This process is the server: nothing has changed since the modules were imported.
        self.in_server = True
        #: What the imports of modules have set in this process' environment, as they would in a new one.
        self.written: dict[str, str | None] = {}
        self._seen: set[str] = set()
        #: Modules that have been taken out of their packages, which did not import them: name -> package, name in it.
        self._taken_out: dict[str, tuple[ModuleType, str]] = {}
        #: Names of modules that were imported from their files instead, each with the reason.
        self._outdated: dict[str, str] = {}
        self.put(entries)

    def put(self, entries: Iterable[Entry]) -> None:
        """Put further modules on the shelf, and have all of its modules out of sight."""
        new = list(entries)
        self._entries.update({entry.name: entry for entry in new})
        for entry in new:
            entry.needs = {self._entries[name].name for name in entry.needs if name in self._entries}
        self._compiled |= {entry.package for entry in new if entry.compiled}
        self._not_native |= {name for entry in new for name, _ in entry.wrote}
        for entry in [*new, *(self._entries[name] for name in self._seen)]:
            self._hide(entry)
        self._seen.clear()

    def set_by_package(self, variable: str) -> None:
        """The code of an installed package has set it in this process, as it would have in a new one."""
        self._not_native.add(variable)

    @property
    def names(self) -> set[str]:
        """The names of all modules on the shelf."""
        return set(self._entries)

    def module(self, name: str) -> ModuleType | None:
        """The module, be it in sight or not; None: it is not on the shelf."""
        entry = self._entries.get(name)
        return None if entry is None else entry.module

    def _hide(self, entry: Entry) -> None:
        """Have it out of sight. `from package import module` must not find it in its package either."""
        sys.modules.pop(entry.name, None)
        package, _, name = entry.name.rpartition(".")
        holder = self._entries.get(package)
        if holder is None or entry.name not in holder.needs:
            module = sys.modules.get(package) if holder is None else holder.module
            if module is not None and variables(module).get(name) is entry.module:
                if entry.displaced is None:
                    delattr(module, name)
                else:
                    setattr(module, name, entry.displaced)
                self._taken_out[entry.name] = module, name

    def why_not(self, name: str) -> str | None:
        """Why an import of this module would give something else now than what is here; None: it would not."""
        entry = self._entries.get(name)
        return f"{name} was not imported" if entry is None else self._changed(self._needed(entry))

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A finder's part of an import. What the import is to be is decided when the module is loaded."""
        entry = self._entries.get(name)
        if entry is None or target is not None:
            return None
        loader: Any = _Loader(self, entry)
        spec = ModuleSpec(name, loader, origin=getattr(variables(entry.module).get("__spec__"), "origin", None))
        spec.submodule_search_locations = variables(entry.module).get("__path__")
        return spec

    def show(self, entry: Entry) -> ModuleType:
        """The module is imported: it and what it needs are in sight from now on.

        Raises:
            NeedsPlainProcess: an import would give something else now, and cannot be repeated in this process.
        """
        needed = self._needed(entry)
        why = None if self.in_server else self._moved(entry) or self._changed(needed)
        if why is not None:
            self._drop(needed, why)
            sys.modules.pop(entry.name, None)
            return importlib.import_module(entry.name)
        for each in needed:
            self._seen.add(each.name)
            sys.modules.setdefault(each.name, each.module)
            if each.name in self._taken_out:
                package, name = self._taken_out[each.name]
                setattr(package, name, each.module)
            self.written.update(each.wrote)
            for variable, value in each.wrote:
                if value is None:
                    os.environ.pop(variable, None)
                else:
                    os.environ[variable] = value
            if each.anew is not None and not self.in_server:
                each.anew()
        return entry.module

    def _needed(self, entry: Entry) -> list[Entry]:
        """The entry and all that it needs and that is not in sight, each once."""
        found, todo = {entry.name: entry}, [entry]
        while todo:
            for name in todo.pop().needs:
                if name not in found and name in self._entries and name not in self._seen:
                    found[name] = self._entries[name]
                    todo.append(found[name])
        return list(found.values())

    def _changed(self, entries: Sequence[Entry]) -> str | None:
        """Why an import of these would give something else now; None: it would not."""
        for entry in entries:
            if self._outdated and entry.needs & self._outdated.keys():
                return next(self._outdated[name] for name in entry.needs if name in self._outdated)
            for variable, value in entry.read:
                if not _is_same(variable, os.environ.get(variable), value):
                    return f"{variable} was {_words(value)} when {entry.name} was imported"
        # A package loads the libraries that read it with its first compiled module.
        seen = {name.partition(".")[0] for name in self._seen}
        loaded = {each.package == "ray": each.name for each in entries if each.compiled and each.package not in seen}
        for is_ray, name in loaded.items():
            reads = ("RAY_",) if is_ray else NATIVE
            for variable in {each for each in {*os.environ, *self._environment} if each.startswith(reads)}:
                then = self._environment.get(variable)
                if variable not in self._not_native and not _is_same(variable, os.environ.get(variable), then):
                    return f"{variable} was {_words(then)} when {name} was loaded"
        return None

    def _moved(self, entry: Entry) -> str | None:
        """Why its package would come from somewhere else now; None: it would not."""
        top = self._entries.get(entry.package)
        if top is None or (
            entry.package in sys.modules and sys.modules[entry.package] is top.module and entry is not top
        ):
            return None
        found = PathFinder.find_spec(entry.package)
        if found is None or found.origin is None or _same_file(found, variables(top.module).get("__spec__")):
            return None
        return f"{entry.package} is now the one of {found.origin}"

    def _drop(self, needed: list[Entry], why: str) -> None:
        """What of these would be another module now is to be imported from its file.

        Raises:
            NeedsPlainProcess: one is of a package with compiled parts, which cannot be loaded twice.
        """
        stale = {each.name: each for each in needed if self._moved(each) or self._changed([each]) is not None}
        grows = True
        while grows:
            more = {each.name: each for each in needed if each.name not in stale and each.needs & stale.keys()}
            stale |= more
            grows = bool(more)
        for entry in stale.values():
            if entry.package in self._compiled:
                raise NeedsPlainProcess(why)
        for entry in stale.values():
            self._outdated[entry.name] = why
            del self._entries[entry.name]


def shelf_here() -> Shelf | None:
    """The shelf of this process; None: it was not forked from a server."""
    return next((each for each in sys.meta_path if isinstance(each, Shelf)), None)


def is_forked() -> bool:
    """Whether this process was forked from a server, so that what it has not imported yet is on a shelf."""
    return shelf_here() is not None


class _Loader:
    """Puts the module of the shelf in the place of the one that is being made.

    Who loads a module by hand, as `importlib.util.LazyLoader` does, goes on with the object that was made. That gets
    all variables of the module then.
    """

    def __init__(self, shelf: Shelf, entry: Entry) -> None:
        self._shelf, self._entry = shelf, entry

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = self._entry.name
        there = sys.modules.get(name)
        found = self._shelf.show(self._entry)
        if sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":  # Python's import system
            sys.modules[name] = found
            return
        variables(module).update(variables(found))
        if there is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = there


def _same_file(one: ModuleSpec, other: ModuleSpec | None) -> bool:
    files = [None if each is None or each.origin is None else os.path.realpath(each.origin) for each in (one, other)]
    return files[0] == files[1] is not None


def _is_same(variable: str, now: str | None, then: str | None) -> bool:
    """Whether an import finds in a variable what it found then. It matters whether there are GPUs, not which."""
    if variable == "OMP_NUM_THREADS" and now is None:
        return True  # Ray sets it before any code runs that is not Ray's own
    if variable == "CUDA_VISIBLE_DEVICES":
        return (now in ("", "-1")) == (then in ("", "-1"))
    return now == then


def _words(value: str | None) -> str:
    return "not set" if value is None else repr(value)
