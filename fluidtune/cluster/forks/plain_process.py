"""The error by which a forked process says that it cannot be what a new one would be, and how others hear of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import isfunction
from typing import TypeVar

_Actor = TypeVar("_Actor")


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
