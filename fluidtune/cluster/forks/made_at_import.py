"""What packages make when they are imported and each process must have alone: ids, random generators, folders.

In a new process each would be another one. So the server notes what is made, and each child makes it anew:

- `DrawnIds`: identifiers, such as ``SESSION = uuid.uuid4().hex``, that a module keeps in a variable, be it as a part of
  a text. What also stands elsewhere (in an object, a class, a default) stays as it is: a package that finds two values
  for one identifier would be worse off than two processes with one.
- `Generators`: random generators that began from entropy. Those to which a package gave a seed stay.
- `Temporaries`: a `tempfile.TemporaryDirectory`, which the process removes at its end. If forks had one together, the
  first that ends would remove it for all. So the server removes it at once, and a child makes another one when it
  imports the module. A folder in which something is, and what ``mkdtemp`` and ``mkstemp`` return, which may be noted
  anywhere, cannot be exchanged. Such a package is left out.
"""

from __future__ import annotations

import base64
import gc
import os
import random
import shutil
import sys
import tempfile
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fluidtune.cluster.forks.shelf import variables

#: Bytes from which on what was drawn is an identifier and can be found again: half of a UUID.
_LEAST = 8
#: The least that a text must have of it, in letters: ``uuid4().hex[:8]`` is the shortest in use, and an equal text by
#: chance has the probability of one in four thousand millions.
_LETTERS = 8
#: A seed that numpy has drawn is a number of 128 bits (``SeedSequence``). Nobody writes one of 64 by hand.
_DRAWN = 1 << 64
#: Returns the name of the module whose code runs now; None: no module's.
Running = Callable[[], str | None]


def _put_back(noting: Any, real: Any) -> None:
    """Modules that have imported ``noting`` by its name have ``real`` from now on."""
    for module in list(sys.modules.values()):
        for name, value in list(variables(module).items()):
            if value is noting:
                setattr(module, name, real)


class DrawnIds:
    """See the module."""

    def __init__(self, running: Running) -> None:
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
            _put_back(noting, urandom)
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


class Generators:
    """Those of Python's `random.Random` and of numpy's ``Generator`` and ``RandomState``, the global ones apart.

    And numpy's ``SeedSequence``, from which generators are spawned.
    """

    def __init__(self) -> None:
        self._of_python: list[weakref.ref[random.Random]] = []
        #: Their bit generators.
        self._of_numpy: list[Any] = []
        self._seeds: list[Any] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note those that begin meanwhile."""
        seed = random.Random.seed

        def noting(generator: random.Random, a: Any = None, version: int = 2) -> None:
            if a is None:
                self._of_python.append(weakref.ref(generator))
            seed(generator, a, version)

        random.Random.seed = noting  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            random.Random.seed = seed  # type: ignore[method-assign]
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            known = {id(each) for each in (*self._of_numpy, *self._seeds)}
            for each in gc.get_objects():
                if type(each) in (numpy.Generator, numpy.RandomState):
                    # What both are made of, as they give it to a copy.
                    for bits in each.__reduce__()[1]:
                        if id(bits) not in known and _is_drawn(getattr(bits, "seed_seq", None)):
                            self._of_numpy.append(bits)
                elif type(each) is numpy.SeedSequence and id(each) not in known and _is_drawn(each):
                    self._seeds.append(each)

    def begin_anew(self) -> None:
        """Let all of them begin from new entropy, in a child."""
        for found in self._of_python:
            generator = found()
            if generator is not None:
                random.Random.seed(generator, os.urandom(32))
        for bits in self._of_numpy:
            bits.state = type(bits)().state
        for seed in self._seeds:
            # As unpickling does: it has no other way to get another entropy.
            new = type(seed)(spawn_key=seed.spawn_key, pool_size=seed.pool_size)
            seed.__setstate__(new.__reduce__()[2])


def _is_drawn(seed: Any) -> bool:
    entropy = getattr(seed, "entropy", None)
    return isinstance(entropy, int) and entropy >= _DRAWN


class Temporaries:
    """See the module."""

    def __init__(self, running: Running) -> None:
        self._running = running
        #: By the module whose import made them: the objects, each with what it was made of.
        self._folders: defaultdict[str, list[tuple[weakref.ref[Any], Any, Any]]] = defaultdict(list)
        #: Paths that cannot be exchanged, some of which are not there any more.
        self._paths: list[str] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is made meanwhile."""
        made_in: defaultdict[str, list[tuple[weakref.ref[Any], Any, Any]]] = defaultdict(list)
        whole: Any = tempfile.TemporaryDirectory
        names: Any = vars(tempfile)
        init, folder, file = whole.__init__, tempfile.mkdtemp, names["_mkstemp_inner"]

        def noting_init(made: Any, *args: Any, **named: Any) -> None:
            init(made, *args, **named)
            made_in[self._running() or ""].append((weakref.ref(made), args, named))

        def noting_folder(*args: Any, **named: Any) -> Any:
            made = folder(*args, **named)
            self._paths.append(os.fspath(made))
            return made

        def noting_file(*args: Any, **named: Any) -> Any:
            made = file(*args, **named)
            self._paths.append(os.fspath(made[1]))
            return made

        whole.__init__ = noting_init
        names.update(mkdtemp=noting_folder, _mkstemp_inner=noting_file)
        try:
            yield
        finally:
            whole.__init__ = init
            names.update(mkdtemp=folder, _mkstemp_inner=file)
            _put_back(noting_folder, folder)
            for module, made in made_in.items():
                self._folders[module] += [each for each in made if _taken_away(each[0]())]
            self._paths = [each for each in self._paths if os.path.lexists(each)]

    def left(self) -> str | None:
        """A path that a package has made, that is still there, and that cannot be exchanged; None: there is none."""
        return next(iter(self._paths), None)

    def of(self, module: str) -> Callable[[], None] | None:
        """What a child does when it imports this module; None: nothing."""
        made = self._folders.get(module)
        return None if not made else lambda: _make_anew(made)

    def remove(self) -> None:
        """Remove what cannot be exchanged."""
        for path in self._paths:
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    os.unlink(path)


def _taken_away(folder: Any) -> bool:
    """Remove the folder of an object that a package keeps, if nothing is in it. Returns whether it was removed."""
    with suppress(OSError):
        if folder is not None and not os.listdir(folder.name):
            folder.cleanup()
            return True
    return False


def _make_anew(made: list[tuple[weakref.ref[Any], Any, Any]]) -> None:
    for reference, args, named in made:
        folder = reference()
        if folder is not None:
            folder.__init__(*args, **named)
