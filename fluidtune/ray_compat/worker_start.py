"""What Ray starts each worker by that has a runtime environment: on nodes of this process, a program that is given.

Ray's own, ``setup_worker.py``, imports Ray to read a JSON string, which takes half a second of a core.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import ray
from ray._private.parameter import RayParams

#: Ray's own program.
RAYS = os.path.join(os.path.dirname(ray.__file__), "_private", "workers", "setup_worker.py")
#: Paths that every reader of a command line on the way leaves as they are.
_PLAIN = re.compile(r"[\w./+@:, -]*")


def words(file: str) -> str | None:
    """What Ray is given for the path of its program, so that Python runs ``file`` at once; None: it cannot be.

    The raylet runs ``python PATH ARGUMENTS``, and leaves the word with "setup_worker.py" in it out where a worker has
    no runtime environment. This word is no path: it has options of Python's, by which nothing installed is in sight,
    and a line that calls ``main(RAYS)`` of the file. It has blanks, because Ray quotes no word without one.
    """
    folder, name = os.path.split(file)
    module = name.removesuffix(".py")
    if not _PLAIN.fullmatch(file + RAYS):
        return None
    return f"-IScimport sys; sys.path.append({folder!r}); import {module}; {module}.main({RAYS!r})"


def start_workers_by(file: str) -> None:
    """Have the nodes that this process starts from now on run ``file`` in place of Ray's own program."""
    found = words(file)
    init = RayParams.__init__
    if found is None or getattr(init, "__wrapped__", None) is not None:
        return

    @functools.wraps(init)
    def giving(params: Any, *args: Any, **named: Any) -> None:
        init(params, *args, **named)
        if params.setup_worker_path is None:
            params.setup_worker_path = found

    RayParams.__init__ = giving
