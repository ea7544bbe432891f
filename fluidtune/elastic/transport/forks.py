"""Keeps a group's connections out of processes that are forked from a worker, as data loaders fork theirs.

A connection is closed for the peer when every process that holds it has closed it or is dead. A forked process holds
all connections of its parent. So the peers of a worker that is killed would wait until its data loaders have noticed
that, which takes 5 s with torch's, and as long as a user's dataset takes for a batch. Here a forked process lets go of
them before anything else of it runs. What stands in their place is /dev/null, so that no number is closed twice.

Linux only, as torch's own use of fork is; elsewhere nothing is done.
"""

from __future__ import annotations

import os
import socket
import stat
import weakref
from contextlib import suppress

#: Where Linux shows a process its open files, by number: proc(5).
OPEN_FILES = "/proc/self/fd"

#: An address as `socket.getsockname` gives it, without what IPv6 adds.
_End = tuple[str, int]


class KeptOut:
    """The connections of one backend."""

    def __init__(self) -> None:
        #: Addresses of servers of this worker or of others: connections with such an end are kept out.
        self.servers: set[_End] = set()
        #: Inodes of the sockets of the present group.
        self.inodes: set[int] = set()
        _all.add(self)


_all: weakref.WeakSet[KeptOut] = weakref.WeakSet()


def open_files() -> set[str]:
    """The numbers of this process' open files."""
    with suppress(OSError):
        return set(os.listdir(OPEN_FILES))
    return set()


def sockets(files: set[str]) -> dict[int, int]:
    """The sockets among these open files: number and inode. The others may be closed by now."""
    found = {}
    for name in files:
        with suppress(OSError):
            status = os.stat(f"{OPEN_FILES}/{name}")
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _ends(number: int) -> set[_End]:
    """Both ends of a socket of the network; none of another one."""
    found = set()
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
        if copy.family in (socket.AF_INET, socket.AF_INET6):
            for ask in (copy.getsockname, copy.getpeername):
                with suppress(OSError):
                    host, port, *_ = ask()
                    # torch's store speaks IPv4 through sockets of IPv6, whose addresses begin so (RFC 4291, 2.5.5.2).
                    found.add((host.split("%")[0].removeprefix("::ffff:"), port))
    return found


def _let_go() -> None:
    servers = {end for kept in _all for end in kept.servers}
    inodes = {inode for kept in _all for inode in kept.inodes}
    if not servers and not inodes:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, inode in sockets(open_files()).items():
        if inode in inodes or not servers.isdisjoint(_ends(number)):
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)
