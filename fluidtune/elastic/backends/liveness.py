"""Which followers of a group live: each keeps a connection to the leader open, which the kernel closes when it dies.

A store tells that a member came, but not that it has died since, and a library that connects to a dead member waits for
its whole time-out. There is no thread: a follower sends one line for each place that it takes, and the leader reads
when it needs to know.
"""

from __future__ import annotations

import socket
from contextlib import suppress

#: (generation, rank) of a follower.
Place = tuple[float, int]


class FollowerConnections:
    """The leader's end: a listening socket on ``host``, and the connections of its followers."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        #: The open connections, each with what has arrived of a line that is not complete.
        self._open: dict[socket.socket, bytes] = {}
        self._places: dict[Place, socket.socket] = {}

    def alive(self, place: Place) -> bool | None:
        """Whether the follower at this place lives; None: none has said that it is there."""
        self._listen()
        connection = self._places.get(place)
        return None if connection is None else connection in self._open

    def move(self, places: dict[Place, Place]) -> None:
        """``places``: old to new. A follower at an old place counts as at the new place, too, before it says so."""
        self._listen()
        self._places.update({new: self._places[old] for old, new in places.items() if old in self._places})

    def forget(self, before: float) -> None:
        """Forget the places of generations below this one."""
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
                        with suppress(ValueError):  # a stranger has connected
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
    """A follower's end, open while the follower lives. OSError if the leader is not there."""

    def __init__(self, address: tuple[str, int], timeout: float) -> None:
        self._connection = socket.create_connection(address, timeout=timeout)
        self._place: Place | None = None

    def say_place(self, place: Place) -> None:
        """Tell the leader this follower's place from now on. OSError if the leader is gone."""
        if place != self._place:
            self._connection.sendall(f"{place[0]} {place[1]}\n".encode())
            self._place = place

    def close(self) -> None:
        self._connection.close()
