"""Temporary files that packages make when they are imported.

A package that makes a `tempfile.TemporaryDirectory` has one for each process, and the process removes it at its end. If
forks had one together, the first that ends would remove it for all. So the server removes it at once, and a child makes
another one in the place of it when it imports the module. Where something is in it, and with ``mkdtemp`` and
``mkstemp``, whose result may be noted anywhere, that cannot be done. Such a package is left out.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fluidtune.cluster.forks.drawn_ids import put_back


class Temporaries:
    """What was made while packages were imported. ``running`` says which module's code runs now; None: no module's."""

    def __init__(self, running: Callable[[], str | None]) -> None:
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
            put_back(noting_folder, folder)
            for module, made in made_in.items():
                self._folders[module] += [each for each in made if _taken_away(each[0]())]
            self._paths = [each for each in self._paths if os.path.lexists(each)]

    def left(self) -> str | None:
        """A path that a package has made, that is still there, and that cannot be exchanged; None: there is none."""
        return next(iter(self._paths), None)

    def of(self, module: str) -> Callable[[], None] | None:
        """What a child is to do when it imports this module; None: nothing."""
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
