"""What a fork server imports before it forks, and what each import has depended on.

An import is left out, with the reason, if after it no process could be forked any more, or forks would share what
each new process has alone: a thread, an open file, a temporary file, CUDA, Ray's generator of ids (`_check`). The
server begins anew then, without it.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, ClassVar

from fluidtune.cluster.forks import forkable
from fluidtune.cluster.forks.made_at_import import DrawnIds, Generators, Temporaries
from fluidtune.cluster.forks.shelf import OF_THE_PROCESS, Entry, Shelf, variables
from fluidtune.ray_compat import worker_program

#: Packages of the driver's that no trial needs: they are the notebook's, a debugger's, the test runner's, or pip's.
NOT_FOR_TRIALS = {"IPython", "ipykernel", "ipywidgets", "jupyter_client", "zmq", "tornado", "debugpy", "pydevd"}
NOT_FOR_TRIALS |= {"xdist", "execnet", "hypothesis", "pip", "setuptools", "_distutils_hack"}
#: What every worker of FluidTune's imports.
_OF_WORKERS = (worker_program.MODULE, "fluidtune.cluster.hosting.worker")
#: Where installed packages are, in a path, Ray apart: CPython's and Debian's names.
_SITES = re.compile(r"/(?:site|dist)-packages/(?!(?:ray|fluidtune)/)")
#: Packages that import Ray.
_WITH_RAY = {"ray", "fluidtune"}
#: What packages import when they are first used, and a driver therefore has not: torch its compiler, when the first
#: optimizer is made; and what a trial that commits or grows imports. For W&B's first run it is 220 modules and 0.5 s of
#: a core, for MLflow's 480 modules and 0.9 s (its default store is a database).
_LATER = {
    "torch": (
        "torch._dynamo",
        "fluidtune.elastic.session",
        "fluidtune.elastic.divided.follower",
        "fluidtune.elastic.divided.module_calls",
    ),
    "wandb": ("wandb.sdk.launch",),
    "mlflow": ("mlflow.store.tracking.sqlalchemy_workspace_store",),
}


class Unforkable(Exception):
    """After the import of the module ``name`` no process can be forked, for the reason ``why``. None: of some."""

    def __init__(self, name: str | None, why: str) -> None:
        super().__init__(f"{name} {why}")
        self.name, self.why = name, why


def installed_modules(modules: Mapping[str, ModuleType]) -> list[str]:
    """The names among these of modules of installed packages, in their order. Nothing of the user's own is among them.

    What is installed from a folder of the user's (``pip install -e``) is the user's own.
    """
    places = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    places |= {place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")}
    folders = tuple(os.path.join(each, "") for place in places for each in {place, os.path.realpath(place)})
    found = []
    for name, module in list(modules.items()):
        if name.partition(".")[0] in NOT_FOR_TRIALS or name == "__main__":
            continue
        file = variables(module).get("__file__")
        if isinstance(file, str) and file.startswith(folders) and variables(module).get("__name__") == name:
            found.append(name)
    return found


def not_on(shelf: Shelf) -> list[str]:
    """The modules of installed packages that this process has imported from their files."""
    there = shelf.names
    return [name for name in installed_modules(sys.modules) if name not in there]


def modules_of_trials() -> tuple[list[str], list[str]]:
    """What the trials of this driver will import: what the driver has imported of installed packages, and the worker.

    What needs no Ray comes first, as far as its name says so.
    """
    found = installed_modules(sys.modules)
    packages = {name.partition(".")[0] for name in found}
    found += [each for package, later in _LATER.items() if package in packages for each in later]
    return _in_order([*_OF_WORKERS, *found])


def modules_of_program(modules: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """What a server imports for a program of Ray's, in two parts as in `modules_of_trials`. None: what this one has."""
    return _in_order([worker_program.MODULE, *(installed_modules(sys.modules) if modules is None else modules)])


def _in_order(names: list[str]) -> tuple[list[str], list[str]]:
    first = [name for name in names if name.partition(".")[0] not in _WITH_RAY]
    return first, [name for name in names if name.partition(".")[0] in _WITH_RAY]


class Notes:
    """What imports have depended on, by the name of the module whose code ran: written while `taken` is open.

    ``generators``: which random generators began meanwhile. ``ids``: which identifiers were drawn. ``temporaries``:
    which temporary files were made.
    """

    def __init__(self) -> None:
        self.generators = Generators()
        self.ids = DrawnIds(lambda: _running(sys._getframe(1)))
        self.temporaries = Temporaries(lambda: _running(sys._getframe(1)))
        self.needs: defaultdict[str, set[str]] = defaultdict(set)
        self.read: defaultdict[str, dict[str, str | None]] = defaultdict(dict)
        self.wrote: defaultdict[str, dict[str, str | None]] = defaultdict(dict)
        #: By module, what its package had by its name before it was imported.
        self.displaced: dict[str, Any] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Note what imports, reads and sets environment variables meanwhile."""
        import_, import_module = builtins.__import__, importlib.import_module
        _Environ.notes = self

        def noting_import(
            name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
        ) -> Any:
            found = import_(name, globals, locals, fromlist, level)
            by = _running(sys._getframe(1))
            if by is not None:
                whole = name
                if level:
                    package = globals.get("__package__") or globals["__name__"].rpartition(".")[0]
                    whole = importlib.util.resolve_name("." * level + name, package)
                self.needs[by].update([whole, *(f"{whole}.{each}" for each in fromlist or ())])
            return found

        def noting_import_module(name: str, package: str | None = None) -> ModuleType:
            found = import_module(name, package)
            by = _running(sys._getframe(1))
            if by is not None:
                self.needs[by].add(importlib.util.resolve_name(name, package))
            return found

        builtins.__import__, importlib.import_module = noting_import, noting_import_module  # type: ignore[assignment]
        os.environ.__class__ = _Environ
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        try:
            with self.ids.noted(), self.generators.noted(), self.temporaries.noted():
                yield
        finally:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            builtins.__import__, importlib.import_module = import_, import_module
            os.environ.__class__ = os._Environ

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Note a module that is loaded for the first time: compiled code imports without Python's statement."""
        by = _running(sys._getframe(1))
        if by is not None:
            self.needs[by].add(name)
        package, _, last = name.rpartition(".")
        self.displaced.setdefault(name, variables(sys.modules.get(package)).get(last))

    def entries(self, modules: Mapping[str, ModuleType]) -> list[Entry]:
        """The modules, each with what its import has depended on. Modules need the packages that they are in."""
        found = {}
        for name, module in modules.items():
            needs = self.needs[name] | {name.rpartition(".")[0]}
            anew, displaced = self.temporaries.of(name), self.displaced.get(name)
            found[name] = Entry(name, module, needs, self.read[name], self.wrote[name], anew, displaced)
        for name, module in modules.items():
            # What no import has made is there because of its package, or because of the module that it stands for.
            spec, own = variables(module).get("__spec__"), str(variables(module).get("__name__", ""))
            if getattr(spec, "name", None) != name:
                for owner in {name.rpartition(".")[0], own} & found.keys() - {name}:
                    found[owner].needs.add(name)
        return list(found.values())


class _Environ(os._Environ):  # type: ignore[type-arg]
    """`os.environ` while notes are taken."""

    notes: Notes
    #: What somebody who copies all of them is about to read, the next one last.
    copied: ClassVar[list[str]] = []

    def __iter__(self):  # type: ignore[no-untyped-def]
        names = list(super().__iter__())
        _Environ.copied = names[::-1]
        return iter(names)

    def __getitem__(self, name):  # type: ignore[no-untyped-def]
        try:
            value = super().__getitem__(name)
        except KeyError:
            value = None
        if _Environ.copied and _Environ.copied[-1] == name:
            _Environ.copied.pop()
        elif name not in OF_THE_PROCESS:
            _Environ.copied = []
            by = _on_the_way(sys._getframe(1))
            if by and not any(name in wrote for wrote in self.notes.wrote.values()):
                for each in by:
                    self.notes.read[each].setdefault(name, value)
        if value is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name, value):  # type: ignore[no-untyped-def]
        super().__setitem__(name, value)
        self._note(name, value)

    def __delitem__(self, name):  # type: ignore[no-untyped-def]
        super().__delitem__(name)
        self._note(name, None)

    def _note(self, name, value):  # type: ignore[no-untyped-def]
        by = _running(sys._getframe(2))
        if by is not None:
            self.notes.wrote[by][name] = value


def _running(frame: FrameType | None) -> str | None:
    """The name of the innermost module whose own code runs in this frame or above it; None: none does."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            name = frame.f_globals.get("__name__")
            return None if name == "__main__" else name
        frame = frame.f_back
    return None


def _on_the_way(frame: FrameType | None) -> set[str]:
    """The module that `_running` names, and those whose functions it has called to come to this frame.

    Such a function may remember what it finds. Those of Python's library and of Ray are not among them.
    """
    found: set[str] = set()
    last = _running(frame)
    while last is not None and frame is not None and frame.f_code.co_name != "<module>":
        if _SITES.search(frame.f_code.co_filename):
            found.add(frame.f_globals.get("__name__", last))
        frame = frame.f_back
    return found if last is None else {*found, last}


def fill(notes: Notes, names: Iterable[str], left_out: Mapping[str, str], careful: bool) -> dict[str, str]:
    """Import the modules in this order. Returns which of them could not be imported, with the reason.

    ``careful``: look after each import whether processes can be forked, and not only after the last one.

    Raises:
        Unforkable: one of them, which is not in ``left_out``, makes forks impossible.
    """
    failed: dict[str, str] = {}
    before = forkable.held()
    packages = {name.partition(".")[0] for name in left_out}
    names = list(names)
    with ExitStack() as meanwhile:
        meanwhile.enter_context(notes.taken())
        if any(name.partition(".")[0] in _WITH_RAY for name in names):
            from fluidtune.ray_compat.random_ids import undrawn

            meanwhile.enter_context(undrawn())
        for name in names:
            if name in sys.modules or name.partition(".")[0] in packages:
                continue
            try:
                importlib.import_module(name)
            except BaseException as error:  # an import may even end the process
                failed[name] = f"{type(error).__name__}: {error}"
            if careful:
                _check(name, notes, before)
    _check(None, notes, before)
    return failed


def _check(name: str | None, notes: Notes, before: forkable.Held) -> None:
    """Raise `Unforkable` if no fork of this process is what a new process would be. ``before``: what it had then."""
    path = notes.temporaries.left()
    made = None if path is None else f"has made {path}, which all processes would have together"
    why = cuda_opened() or forkable.unforkable(before) or made
    if why is not None:
        notes.temporaries.remove()
        raise Unforkable(name, why)
    if "ray" in sys.modules:
        from fluidtune.ray_compat.random_ids import draw

        if forkable.in_fork(draw) == forkable.in_fork(draw):
            raise Unforkable(name, "has drawn from Ray's generator of ids, of which every fork has the same")


def cuda_opened(proc: str = "/proc/self") -> str | None:
    """In words, that this process has opened CUDA, so that no child of it can use the GPU; None: it has not."""
    with suppress(OSError):
        for descriptor in os.listdir(f"{proc}/fd"):
            with suppress(OSError):
                target = os.readlink(f"{proc}/fd/{descriptor}")
                if target.startswith("/dev/nvidia"):
                    return f"has opened {target}"
    with suppress(OSError):
        for line in Path(f"{proc}/maps").read_text().splitlines():
            if Path(line.split(maxsplit=5)[-1]).name.startswith("libcuda.so"):
                return "has loaded CUDA's driver (libcuda)"
    return None
