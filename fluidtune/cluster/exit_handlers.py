"""What a trial has asked to be done at the end of its process, and does not want to lose.

A handler that the user's code has registered with `atexit` is called when the trial is unloaded, the last one first.
What a library has registered while the trial ran is called by Python when the process ends, because the library may be
of no use afterwards: such a worker serves no further trial. What a library registers while it is imported belongs to
the process.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from fluidtune.cluster.library_imports import Libraries, importing

#: Packages whose handlers at run time are about the process, never about a trial. tqdm's ends the one thread that
#: redraws the bars of all who use it.
_OF_THE_PROCESS = ("weakref", "fluidtune", "ray", "tqdm")


class _Handler:
    """One registered call. Its identity is what `atexit` knows."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owner: str | None):
        self.function = function
        self.args = args
        self.kwargs = kwargs
        #: The package that has registered it; None: the user's code.
        self.owner = owner

    def __call__(self) -> None:
        self.function(*self.args, **self.kwargs)


class ExitHandlers:
    """Takes down who registers which handler, once it is installed."""

    def __init__(self, libraries: Libraries) -> None:
        self._libraries = libraries
        self._register = atexit.register
        self._unregister = atexit.unregister
        #: Those registered while no library was imported, the oldest first.
        self._handlers: list[_Handler] = []
        self._finalizers = set(_finalizers())
        self._of_multiprocessing = set(_of_multiprocessing())

    def install(self) -> None:
        """Stand between `atexit` and who registers from now on."""
        atexit.register = self.register  # type: ignore[assignment]
        atexit.unregister = self.unregister  # type: ignore[assignment]

    def register(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """`atexit.register`."""
        frame = sys._getframe(1)
        is_library = self._libraries.has_code(frame.f_code)
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if is_library and (package in _OF_THE_PROCESS or importing(frame)):
            return self._register(function, *args, **kwargs)
        if not callable(function):
            raise TypeError("the first argument must be callable")
        handler = _Handler(function, args, kwargs, package if is_library else None)
        self._handlers.append(handler)
        self._register(handler)
        return function

    def unregister(self, function: Callable[..., Any], /) -> None:
        """`atexit.unregister`."""
        self._unregister(function)
        for handler in [each for each in self._handlers if each.function == function]:
            self._handlers.remove(handler)
            self._unregister(handler)

    def run(self) -> None:
        """Call the handlers that the trial's own code has registered, as Python does at the end of a process."""
        for handler in reversed([each for each in self._handlers if each.owner is None]):
            if handler in self._handlers:  # an earlier one may have unregistered it
                self._handlers.remove(handler)
                self._unregister(handler)
                _call(handler)
        # A handler may have registered another one.
        if any(each.owner is None for each in self._handlers):
            self.run()

    def run_finalizers(self) -> None:
        """Call the `weakref.finalize` of the trial's own code whose objects are still there, the last one first."""
        for finalizer in reversed(self._new_finalizers()):
            if self._is_users(finalizer):
                _call(finalizer)

    def left(self) -> str | None:
        """What the end of the process has to call yet, in words; None: nothing of a trial."""
        owners = sorted({each.owner for each in self._handlers if each.owner is not None})
        if owners:
            return f"exit handlers left by {', '.join(owners)}"
        if any(not self._is_users(each) and not _is_of_operators(each) for each in self._new_finalizers()):
            return "finalizers left that run at exit"
        if set(_of_multiprocessing()) - self._of_multiprocessing:
            return "finalizers left by multiprocessing"
        return None

    def library_imported(self) -> None:
        """What finalizers there are now were made by the import of a library, or by a trial that is still there."""
        self._finalizers |= {each for each in _finalizers() if not self._is_users(each)}
        self._of_multiprocessing |= set(_of_multiprocessing())

    def _new_finalizers(self) -> list[weakref.finalize[Any, Any]]:
        return [each for each in _finalizers() if each not in self._finalizers]

    def _is_users(self, finalizer: weakref.finalize[Any, Any]) -> bool:
        alive = finalizer.peek()
        code = getattr(alive[1], "__code__", None) if alive else None
        return code is not None and not self._libraries.has_code(code)


def _finalizers() -> list[weakref.finalize[Any, Any]]:
    """The living finalizers that run at exit, the oldest first. `weakref` has no public list of them."""
    known = [(info.index, each) for each, info in list(weakref.finalize._registry.items()) if info.atexit]  # type: ignore[attr-defined]
    return [each for _, each in sorted(known, key=lambda pair: pair[0])]


def _is_of_operators(finalizer: weakref.finalize[Any, Any]) -> bool:
    """Whether it would withdraw operators from torch: whose these are, is a question of `library_settings`."""
    alive = finalizer.peek()
    return alive is not None and getattr(alive[1], "__module__", None) == "torch.library"


def _of_multiprocessing() -> list[Any]:
    """The finalizers that multiprocessing calls at exit."""
    return [key for key in list(util._finalizer_registry) if key[0] is not None]  # type: ignore[attr-defined]


def _call(handler: Callable[[], Any]) -> None:
    """Call it; what it raises is printed and dropped, as at the end of a process."""
    try:
        handler()
    except SystemExit:
        pass
    except BaseException:
        print("Exception ignored in atexit callback:", file=sys.stderr)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
