"""Who of a group's followers is alive: each keeps a connection to the leader open, and the kernel closes it.

A store says that a member came, not that it died since; a library that connects to it would wait for its whole
time-out. No thread, no messages but one hello: the leader looks when it needs to know.
"""

from __future__ import annotations

import socket
from contextlib import suppress

#: (generation, rank) of a follower.
Place = tuple[float, int]


class Pulses:
    """The leader's end: a listening socket on ``host`` and what arrived at it."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._unknown: list[socket.socket] = []
        self._known: dict[Place, socket.socket] = {}

    def alive(self, place: Place) -> bool | None:
        """Whether this follower lives; None when it has not said hello."""
        self._accept()
        connection = self._known.get(place)
        return None if connection is None else _open(connection)

    def forget(self, before: float) -> None:
        """Generations below this one are over."""
        for place in [place for place in self._known if place[0] < before]:
            self._known.pop(place).close()

    def close(self) -> None:
        for connection in (self._listener, *self._unknown, *self._known.values()):
            connection.close()

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._unknown.append(connection)
        for connection in list(self._unknown):
            with suppress(OSError, ValueError):
                generation, rank = connection.recv(64).decode().split()
                self._known[float(generation), int(rank)] = connection
            if connection in self._known.values() or not _open(connection):
                self._unknown.remove(connection)


def hello(address: tuple[str, int], place: Place, timeout: float) -> socket.socket:
    """A follower's end; as long as it is open, it lives. OSError when the leader is not there."""
    connection = socket.create_connection(address, timeout=timeout)
    connection.sendall(f"{place[0]} {place[1]}\n".encode())
    return connection


def _open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
