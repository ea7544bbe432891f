"""Decides whether a worker process may serve another trial.

A warm worker saves the seconds that a new process costs, provided that the next trial finds it as it would find a new
process. What can be put back is put back: the settings of the interpreter (`process_settings`), of logging
(`logging_state`) and of libraries (`library_settings`), random streams, and modules of the user's own, which are
imported anew. The user's exit handlers are called (`exit_handlers`). What cannot be put back makes the worker *dirty*,
and its owner replaces it: some settings, patched modules (`patches`), and threads, processes, files, ports and memory
that are left (`process_leftovers`). What a library changes while it is imported stays (`library_imports`).

The random streams of Python, numpy and torch start from entropy, as in a new process.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from types import FunctionType, ModuleType
from typing import Any

from fluidtune.cluster.exit_handlers import ExitHandlers
from fluidtune.cluster.gpu_probe import cuda_failure, torch_on_gpu
from fluidtune.cluster.library_imports import Libraries, LibraryImports, is_imported
from fluidtune.cluster.library_settings import KNOWN, library_settings
from fluidtune.cluster.logging_state import LoggingState
from fluidtune.cluster.patches import Patches
from fluidtune.cluster.process_leftovers import Leftovers
from fluidtune.cluster.process_settings import Setting, interpreter_settings
from salus_share.memory import forget_workspaces


class _Unreadable:
    """What a setting reads as that cannot be read; it is equal to nothing."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Settings:
    """Settings and their values before a trial's code ran."""

    def __init__(self) -> None:
        self._settings: list[Setting] = []
        self._values: list[Any] = []
        self._libraries: set[str] = set()
        self._before: list[Any] = []
        self._add(interpreter_settings())
        self.note_libraries()

    def _add(self, settings: list[Setting]) -> None:
        self._settings += settings
        self._values += [_read(each) for each in settings]

    def note_libraries(self, complete: str | None = None) -> None:
        """Add the settings of libraries that are imported and were not before.

        A library that another thread is importing, or whose import has failed, has no settings yet. ``complete``: the
        module whose code has just ended.
        """
        for name in KNOWN:
            module = sys.modules.get(name)
            if name not in self._libraries and module is not None and (name == complete or is_imported(module)):
                self._libraries.add(name)
                self._add(library_settings(name, module))

    def import_begins(self) -> None:
        """A library is about to be imported."""
        self._before = [_read(each) for each in self._settings]

    def import_ended(self, complete: str | None) -> None:
        """It was imported: what that has changed belongs to the process from now on. See `note_libraries`."""
        for index, before in enumerate(self._before):
            after = _read(self._settings[index])
            if after != before:
                self._values[index] = _with_change(self._values[index], before, after)
        self.note_libraries(complete)

    def restore(self) -> str | None:
        """Put all of them back. Returns what could not be, in words."""
        stuck = []
        for setting, value in zip(self._settings, self._values, strict=True):
            if not setting.always and _read(setting) == value:
                continue
            if not setting.once:
                with suppress(Exception):  # whether it is put back is seen next
                    setting.write(value)
                if _read(setting) == value:
                    continue
            stuck.append(setting.name)
        return f"changed for good: {', '.join(stuck)}" if stuck else None


def _read(setting: Setting) -> Any:
    try:
        return setting.read()
    except Exception as error:
        return _Unreadable(error)


def _with_change(value: Any, before: Any, after: Any) -> Any:
    """``value`` with what changed between ``before`` and ``after``; a trial may have changed other parts of it."""
    if value == before:
        return after
    if isinstance(value, dict):
        changed = {key: each for key, each in after.items() if key not in before or before[key] != each}
        return {**{key: each for key, each in value.items() if key in after or key not in before}, **changed}
    if isinstance(value, list) and isinstance(after, list):
        return [*(each for each in after if each not in before), *value]
    return value


class ProcessBaseline:
    """What the process was like before the first trial's code ran in it.

    ``watch``: tell what libraries do from what trials do from now on, in the imports and exit handlers of this process.
    """

    def __init__(self, watch: bool = False) -> None:
        self._complete = False
        self._libraries = Libraries()
        self._exits = ExitHandlers(self._libraries)
        if watch:
            self._exits.install()
            LibraryImports(self._libraries, self._import_begins, self._import_ended).install()
        #: The names of modules that stay: those that were there, and libraries.
        self._modules = set(sys.modules)
        self._settings = Settings()
        self._logging = LoggingState()
        self._leftovers = Leftovers()
        self._patches = Patches()
        #: The root logger when the import of a library began.
        self._root_logger: Any = None
        #: No library was imported since the collector was last told to leave its objects alone.
        self._frozen = False
        #: All of the above is known: what reading it has imported is part of it.
        self._complete = True

    def note_imports(self) -> None:
        """Note the process' size; called when a trial's modules are imported and its code has not run."""
        self._leftovers.note_size()
        self._settings.note_libraries()

    def _import_begins(self) -> None:
        if not self._complete:
            return
        self._settings.import_begins()
        self._root_logger = self._logging.root()
        self._patches.import_begins()

    def _import_ended(self, module: str, complete: bool) -> None:
        if not self._complete:
            return
        self._settings.import_ended(module if complete else None)
        self._logging.note(module.partition(".")[0])
        if self._logging.root() != self._root_logger:
            self._logging.note_root()
        self._exits.library_imported()
        self._patches.import_ended()
        self._frozen = False

    def restore(self, memory_free: Callable[[], None] | None = None) -> str | None:
        """Put back what a trial has changed, after its exit handlers have run.

        ``memory_free``: called when the trial's memory is free, before it is looked for what is left. Returns None if
        the process is as good as new, else one line that says what the trial has left behind.
        """
        self._exits.run()
        failure = cuda_failure()
        if failure is not None:
            return f"CUDA cannot be used any more: {failure}"
        trouble = self._forget_modules()
        self._logging.restore()
        trouble = self._settings.restore() or trouble
        self._new_streams()
        gc.collect()
        self._exits.run_finalizers()
        _free_gpu()  # after the collector, which frees models that hold themselves, as prepared ones do by their hooks
        if memory_free is not None:
            memory_free()
        # Threads come last: those that are ending are waited for, and nobody waits for a worker that is dirty anyway.
        trouble = trouble or self._exits.left() or self._patches.found() or self._leftovers.found()
        if not self._frozen and trouble is None:
            # What has come since belongs to libraries for the most part: later collections need not look at it.
            gc.freeze()
            self._frozen = True
        return trouble

    def _forget_modules(self) -> str | None:
        """Have the user's own modules imported anew by the next trial. Returns which of them cannot be."""
        stuck, kept, forgotten = [], [], {}
        for name in [name for name in list(sys.modules) if name not in self._modules]:
            module = sys.modules[name]
            if self._libraries.has_module(module):
                self._modules.add(name)
                kept.append(module)
                continue
            if getattr(module, "__file__", None):
                forgotten[name] = module
            if isinstance(getattr(getattr(module, "__spec__", None), "loader", None), ExtensionFileLoader):
                stuck.append(name)
            del sys.modules[name]
        if stuck:
            return f"modules that cannot be imported anew: {', '.join(stuck)}"
        own = _objects_of(forgotten)
        for library in kept if forgotten else ():
            values = list(vars(library).values())
            if not own.keys().isdisjoint(map(id, values)):
                name = next(own[id(value)] for value in values if id(value) in own)
                return f"the module {name}, which would be imported anew, but {library.__name__} holds the old one"
        return None

    def _new_streams(self) -> None:
        random.seed()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.seed()


def _objects_of(modules: dict[str, ModuleType]) -> dict[int, str]:
    """The modules, their classes and functions, and instances of these classes, each as its id and its module's name.

    A library that has a name for one of them would go on with it, beside the module of the next trial. For example, a
    class of the library may be derived from a class of the user's.
    """
    found = {id(module): name for name, module in modules.items()}
    for module in modules.values():
        for value in list(vars(module).values()):
            kind = type(value)  # not its __class__, which may be a proxy's
            name = value.__module__ if issubclass(kind, (type, FunctionType)) else kind.__module__
            if isinstance(name, str) and name in modules:
                found[id(value)] = name
    return found


def _free_gpu() -> None:
    """Give the GPU back what torch keeps of it, and have the next trial's peak begin anew."""
    torch = torch_on_gpu()
    if torch is None:
        return
    forget_workspaces(torch)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
