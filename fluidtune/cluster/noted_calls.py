"""What a trial asks of the end of its process, and other calls that cannot be read back: they are noted.

Handlers that the user's code has registered with `atexit` are called when the trial leaves, the last one first. Those
that a library has registered while the trial ran are left to the end of the process, because the library may be of no
use afterwards.
"""

from __future__ import annotations

import atexit
import codecs
import functools
import sys
from collections.abc import Callable
from typing import Any

from fluidtune.cluster.trial_modules import OURS, package_of

#: Packages whose handlers at run time are about the process, never about a trial. tqdm's ends the one thread that
#: redraws the bars of all who use it.
_OF_THE_PROCESS = {"", *OURS, "ray", "tqdm"}


class NotedCalls:
    """Stands between `atexit` and its callers, and before functions whose effect cannot be read.

    ``torch``: the module; None: it is not imported.
    """

    def __init__(self, torch: Any) -> None:
        self._register, self._unregister = atexit.register, atexit.unregister
        atexit.register, atexit.unregister = self.register, self.unregister  # type: ignore[assignment]
        #: The package that has registered it, None: the user's code; the function, and its arguments; the oldest first.
        self._handlers: list[tuple[str | None, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
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
            self._handlers.append((package, function, args, kwargs))
        return function

    def unregister(self, function: Callable[..., Any], /) -> None:
        """`atexit.unregister`."""
        self._unregister(function)
        self._handlers = [each for each in self._handlers if each[1] != function]

    def call_users_handlers(self) -> None:
        """Call the handlers of the user's code, as Python does at the end of a process."""
        while users := [each for each in self._handlers if each[0] is None]:  # one may register another one
            self._handlers.remove(users[-1])
            _, function, args, kwargs = users[-1]
            self._unregister(function)
            try:
                function(*args, **kwargs)
            except SystemExit:
                pass
            except BaseException:
                print("Exception ignored in atexit callback:", file=sys.stderr)
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]

    def left(self) -> str | None:
        """What is left to the end of the process, in words; None: nothing."""
        owners = {each[0] for each in self._handlers if each[0] is not None}
        if owners:
            return f"exit handlers left by {', '.join(sorted(owners))}"
        return f"called: {', '.join(self._called)}" if self._called else None
