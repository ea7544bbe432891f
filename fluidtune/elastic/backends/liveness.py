"""Who of a group's followers is alive: each keeps a connection to the leader open, and the kernel closes it.

A store says that a member came, not that it died since; a library that connects to it would wait for its whole
time-out. No thread, one line for each place that a follower takes: the leader looks when it needs to know.
"""

from __future__ import annotations

import socket
from contextlib import suppress

#: (generation, rank) of a follower.
Place = tuple[float, int]


class FollowerConnections:
    """The leader's end: a listening socket on ``host`` and what arrived at it."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        #: What the followers that live have said and did not end with a newline yet.
        self._open: dict[socket.socket, bytes] = {}
        self._places: dict[Place, socket.socket] = {}

    def alive(self, place: Place) -> bool | None:
        """Whether this follower lives; None when it has not said that it is there."""
        self._listen()
        connection = self._places.get(place)
        return None if connection is None else connection in self._open

    def move(self, places: dict[Place, Place]) -> None:
        """Whoever is at a place of ``places`` is at the other one too, though it has not said so yet."""
        self._listen()
        self._places.update({new: self._places[old] for old, new in places.items() if old in self._places})

    def forget(self, before: float) -> None:
        """Generations below this one are over."""
        self._places = {place: connection for place, connection in self._places.items() if place[0] >= before}

    def close(self) -> None:
        for connection in (self._listener, *self._open):
            connection.close()

    def _listen(self) -> None:
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._open[connection] = b""
        for connection in list(self._open):
            try:
                while data := connection.recv(4096):
                    *lines, self._open[connection] = (self._open[connection] + data).split(b"\n")
                    for line in lines:
                        with suppress(ValueError):  # somebody else's knock
                            generation, rank = line.split()
                            self._places[float(generation), int(rank)] = connection
                closed = True
            except BlockingIOError:
                closed = False
            except OSError:
                closed = True
            if closed:
                del self._open[connection]
                connection.close()


class LeaderConnection:
    """A follower's end: as long as it is open, it lives. OSError when the leader is not there."""

    def __init__(self, address: tuple[str, int], timeout: float) -> None:
        self._connection = socket.create_connection(address, timeout=timeout)
        self._place: Place | None = None

    def say_place(self, place: Place) -> None:
        """Say where this follower is from now on. OSError when the leader is gone."""
        if place != self._place:
            self._connection.sendall(f"{place[0]} {place[1]}\n".encode())
            self._place = place

    def close(self) -> None:
        self._connection.close()
