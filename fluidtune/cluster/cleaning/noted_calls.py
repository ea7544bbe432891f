"""What a trial asks of the end of its process, and other calls that cannot be read back: they are noted.

A process with exit handlers that the trial or a library has registered while the trial ran serves no further trial, so
that they run when it ends, as under stock Ray Tune.
"""

from __future__ import annotations

import atexit
import codecs
import functools
import sys
from collections.abc import Callable
from typing import Any

from fluidtune.cluster.cleaning.trial_modules import OURS, package_of

#: Packages whose handlers at run time are about the process, never about a trial. tqdm's ends the one thread that
#: redraws the bars of all its users.
_OF_THE_PROCESS = {"", *OURS, "ray", "tqdm"}


class NotedCalls:
    """Stands between `atexit` and its callers, and before functions whose effect cannot be read.

    ``torch``: the module; None: it is not imported.
    """

    def __init__(self, torch: Any) -> None:
        self._register, self._unregister = atexit.register, atexit.unregister
        atexit.register, atexit.unregister = self.register, self.unregister  # type: ignore[assignment]
        #: Each handler with the package that has registered it.
        self._handlers: list[tuple[str, Callable[..., Any]]] = []
        self._called: list[str] = []
        # torch's may be called once a process, and that it was called does not always show in the number.
        for owner, name in ((sys, "addaudithook"), (codecs, "register"), (torch, "set_num_interop_threads")):
            if owner is not None:
                setattr(owner, name, self._noting(f"{owner.__name__}.{name}", getattr(owner, name)))

    def _noting(self, words: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self._called.append(words)
            return function(*args, **kwargs)

        return noting

    def register(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """`atexit.register`."""
        self._register(function, *args, **kwargs)
        package = package_of(sys._getframe(1).f_code.co_filename)
        if package not in _OF_THE_PROCESS:
            self._handlers.append((package or "the trial", function))
        return function

    def unregister(self, function: Callable[..., Any], /) -> None:
        """`atexit.unregister`."""
        self._unregister(function)
        self._handlers = [each for each in self._handlers if each[1] != function]

    def left(self) -> str | None:
        """What is left to the end of the process, in words; None: nothing."""
        if self._handlers:
            return f"exit handlers left by {', '.join(sorted({owner for owner, _ in self._handlers}))}"
        return f"called: {', '.join(self._called)}" if self._called else None
