"""Two files in memory that hold a node's shared data and say which process loads them.

The driver has them open on its own node, and an actor on each other node (memfd_create(2)). No path leads to them but
``/proc/PID/fd/N``, which only the same user's processes can open. There is no socket and no protocol. The kernel frees
them when the job has ended and nobody maps them, whoever was killed.

The first file has a place for each data set, `PLACE` bytes wide. It takes memory only where something was written.
Whoever loads the data of a place locks its byte of the second file (fcntl(2)). Other processes wait for that lock. The
kernel gives it to the next one when its holder ends in any way. Processes that the holder has forked do not have it.
A process loses its locks when it closes any descriptor of the file, and a mapping ends with that. So the file with the
locks is another one, which a process opens once.
"""

from __future__ import annotations

import fcntl
import functools
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

#: The environment variable that says where a worker's node has the files: their paths, or the name of the actor.
VARIABLE = "FLUIDTUNE_DATA"
#: The name of the files, in the lists of a process' mappings.
NAME = "memfd:fluidtune-shared"
#: Bytes of a place, and how many there are: 2^62 together. A file in memory has at most 2^63 - 1 (s_maxbytes).
PLACE, _PLACES = 1 << 42, 1 << 20

#: The threads of one process exclude each other by these: the kernel's lock is the process'.
_threads: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
os.register_at_fork(after_in_child=_threads.clear)


class NodeFiles:
    """Holds the files open. ``paths``: where processes of the node find them."""

    def __init__(self) -> None:
        self._files = [os.memfd_create(NAME.removeprefix("memfd:")) for _ in range(2)]
        self.paths = ":".join(f"/proc/{os.getpid()}/fd/{file}" for file in self._files)

    def close(self) -> None:
        """Let go of all data sets. Processes that have mapped one keep it."""
        for file in self._files:
            os.close(file)
        self._files = []


@contextmanager
def locked(key: bytes) -> Iterator[tuple[int, int]]:
    """Have the place of the data set alone. Yields the file, and where in it the place begins.

    Raises:
        OSError, ValueError, RayError: this process cannot have the node's files.
    """
    data, locks = _files_of_node()
    number = int.from_bytes(key[:8], "big") % _PLACES
    with _threads[number]:
        fcntl.lockf(locks, fcntl.LOCK_EX, 1, number)
        try:
            yield data, number * PLACE
        finally:
            fcntl.lockf(locks, fcntl.LOCK_UN, 1, number)


def _files_of_node() -> tuple[int, ...]:
    where, ray = os.environ[VARIABLE], sys.modules.get("ray")
    if not where.startswith("/") and ray is not None and ray.is_initialized():
        # Processes that this one starts find the files without Ray.
        where = os.environ[VARIABLE] = ray.get(ray.get_actor(where).shared_data.remote())
    return _opened(where)


@functools.cache
def _opened(paths: str) -> tuple[int, ...]:
    for path in paths.split(":"):
        if NAME not in os.readlink(path):
            raise FileNotFoundError(f"{path} is no file of shared data: the process that held it has ended")
    return tuple(os.open(path, os.O_RDWR) for path in paths.split(":"))
