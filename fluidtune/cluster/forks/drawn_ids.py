"""Identifiers that packages draw when they are imported, such as ``SESSION = uuid.uuid4().hex``.

In a new process each would be another one. So each child draws those anew that a module keeps in a variable, be it as a
part of a text. What also stands elsewhere (in an object, a class, a default) stays as it is: a package that finds two
values for one identifier would be worse off than two processes with one.
"""

from __future__ import annotations

import base64
import os
import random
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fluidtune.cluster.forks.lazily import variables

#: Bytes from which on what was drawn is an identifier and can be found again. Judgement: half of a UUID.
_LEAST = 8
#: The least that a text must have of it, in letters. Judgement: ``uuid4().hex[:8]`` is the shortest in use, and an
#: equal text by chance has the probability of one in four thousand millions.
_LETTERS = 8


class DrawnIds:
    """See the module. ``running`` says which module's code runs now; None: no module's."""

    def __init__(self, running: Callable[[], str | None]) -> None:
        self._running = running
        #: Each value with what was drawn for it, and the variables that hold it.
        self._kept: list[tuple[Any, bytes, list[tuple[dict[str, Any], str]]]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is drawn meanwhile."""
        urandom = os.urandom
        drawn: list[tuple[str, bytes]] = []

        def noting(size: int) -> bytes:
            found = urandom(size)
            by = self._running() if size >= _LEAST else None
            if by is not None:
                drawn.append((by, bytes(bytearray(found))))  # another object than the one that the package may keep
            return found

        os.urandom = random._urandom = noting  # type: ignore[attr-defined]
        try:
            yield
        finally:
            os.urandom = random._urandom = urandom  # type: ignore[attr-defined]
            put_back(noting, urandom)
            self._keep(drawn)

    def _keep(self, drawn: list[tuple[str, bytes]]) -> None:
        """Find what of it is in variables of modules alone."""
        found: dict[int, tuple[Any, bytes]] = {}
        for by, bits in drawn:
            for value in list(variables(sys.modules.get(by)).values()):
                if type(value) in (str, bytes, int, uuid.UUID) and _redrawn(value, bits, bits) is not None:
                    found[id(value)] = value, bits
        if not found:
            return
        places: dict[int, list[tuple[dict[str, Any], str]]] = {each: [] for each in found}
        of_modules = [variables(each) for each in list(sys.modules.values())]
        for holder in {id(each): each for each in of_modules}.values():
            for name in list(holder):
                if id(holder[name]) in places:
                    places[id(holder[name])].append((holder, name))
        for each, (value, bits) in found.items():
            # Python's collector does not know of all that holds a text, but each holder counts: these variables, the
            # pair in `found`, `value` and the argument of `getrefcount`.
            if sys.getrefcount(value) == len(places[each]) + 3:
                self._kept.append((value, bits, places[each]))

    def draw_anew(self) -> None:
        """Draw all of them anew, in a child."""
        anew = {bits: os.urandom(len(bits)) for _, bits, _ in self._kept}
        for value, bits, places in self._kept:
            other = _redrawn(value, bits, anew[bits])
            for holder, name in places:
                if holder.get(name) is value:
                    holder[name] = other


def put_back(noting: Any, real: Any) -> None:
    """Modules that have imported ``noting`` by its name have ``real`` from now on."""
    for module in list(sys.modules.values()):
        for name, value in list(variables(module).items()):
            if value is noting:
                setattr(module, name, real)


def _redrawn(value: Any, old: bytes, new: bytes) -> Any:
    """The value with ``new`` in the place of ``old``; None: ``old`` is not in it."""
    if isinstance(value, str):
        best = max(((_found(value, before), after) for before, after in zip(_texts(old), _texts(new), strict=True)))
        (size, start), after = best
        return value[:start] + after[:size] + value[start + size :] if size >= _LETTERS else None
    if isinstance(value, bytes):
        turned = value.replace(old, new).replace(old[::-1], new[::-1])
        return turned if old in value or old[::-1] in value else None
    return next((after for before, after in zip(_numbers(old), _numbers(new), strict=True) if value == before), None)


def _found(text: str, part: str) -> tuple[int, int]:
    """How many letters of the beginning of ``part`` are in ``text``, and where; less than `_LETTERS` count as none."""
    start = text.find(part[:_LETTERS])
    size = 0
    while start >= 0 and size < len(part) and text[start + size : start + size + 1] == part[size]:
        size += 1
    return size, start


def _texts(bits: bytes) -> list[str]:
    """What `uuid`, `secrets` and people write of drawn bytes. `secrets` has them the other way round."""
    found = [str(_uuid(bits)), _uuid(bits).hex] if len(bits) == 16 else []
    for each in (bits, bits[::-1]):
        found += [each.hex(), base64.urlsafe_b64encode(each).rstrip(b"=").decode(), base64.b64encode(each).decode()]
    return found


def _numbers(bits: bytes) -> list[Any]:
    found: list[Any] = [_uuid(bits), _uuid(bits).int] if len(bits) == 16 else []
    return [*found, int.from_bytes(bits, "big"), int.from_bytes(bits, "little")]


def _uuid(bits: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=bits, version=4)
