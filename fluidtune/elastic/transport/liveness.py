"""Which followers of a group live: each keeps a connection to the leader open, which the kernel closes when it dies.

A store tells that a member came, but not that it has died since, and a library that connects to a dead member waits for
its whole time-out. There is no thread: a follower sends one line for each place that it takes, and the leader reads
when it needs to know.

Each line is signed with the trial's secret, over a number of the leader's that is never used again and over the two
ends of the connection: so a line that was overheard is of no use on another connection. The number is in the leader's
*invitation*, which stands in its store: a follower that had to wait for it on the connection would wait for the
leader's next look. A connection on which something else is said is closed.
"""

from __future__ import annotations

import secrets
import socket
import threading
from contextlib import suppress

from .signing import Signer

#: (generation, rank) of a follower.
Place = tuple[float, int]
#: The most bytes of a line: a signature has 64, a generation and a rank have a few digits each.
_LINE = 256


class FollowerConnections:
    """The leader's end: a listening socket on ``host``, and the connections of its followers. Any thread may ask."""

    def __init__(self, host: str, signer: Signer) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._signer = signer
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._number = secrets.token_hex(16)
        self.port: int = self._listener.getsockname()[1]
        #: What a follower must know to connect.
        self.invitation = f"{self.port} {self._number}".encode()
        #: The open connections, each with what has arrived of a line that is not complete.
        self._open: dict[socket.socket, bytes] = {}
        self._places: dict[Place, socket.socket] = {}
        self._lock = threading.Lock()

    def alive(self, place: Place) -> bool | None:
        """Whether the follower at this place lives; None: no follower has come to it."""
        with self._lock:
            self._listen()
            connection = self._places.get(place)
            return None if connection is None else connection in self._open

    def move(self, places: dict[Place, Place]) -> None:
        """``places``: old to new. A follower at an old place counts as at the new place, too, before it says so."""
        with self._lock:
            self._listen()
            self._places.update({new: self._places[old] for old, new in places.items() if old in self._places})

    def forget(self, before: float) -> None:
        """Forget the places of generations below this one."""
        with self._lock:
            self._places = {place: connection for place, connection in self._places.items() if place[0] >= before}

    def close(self) -> None:
        with self._lock:
            for connection in (self._listener, *self._open):
                connection.close()

    def _listen(self) -> None:
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._open[connection] = b""
        for connection in list(self._open):
            if not self._read(connection):
                del self._open[connection]
                connection.close()

    def _read(self, connection: socket.socket) -> bool:
        """Read what has arrived. Returns whether the connection is open, and a follower's as far as is known."""
        try:
            while data := connection.recv(4096):
                *lines, self._open[connection] = (self._open[connection] + data).split(b"\n")
                if len(self._open[connection]) > _LINE or not all(self._take(line, connection) for line in lines):
                    self._signer.refuse(f"a line from {_end(connection.getpeername())}")
                    return False
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _take(self, line: bytes, connection: socket.socket) -> bool:
        """Note the place that a follower says. Returns False for a line that is not one of this trial's followers'."""
        try:
            place, signature = line.decode().rsplit(" ", 1)
            generation, rank = place.split(" ")
            noted, said = (float(generation), int(rank)), bytes.fromhex(signature)
        except ValueError:
            return False
        ends = _ends(connection.getpeername(), connection.getsockname())
        if not self._signer.matches(f"place {self._number} {ends}", place.encode(), said):
            return False
        self._places[noted] = connection
        return True


class LeaderConnection:
    """A follower's end, open while the follower lives. OSError if the leader is not there.

    ``host``: the leader's. ``invitation``: `FollowerConnections.invitation`. ``timeout``: seconds.
    """

    def __init__(self, host: str, invitation: bytes, signer: Signer, timeout: float) -> None:
        port, self._number = invitation.decode().split(" ")
        self._signer = signer
        #: Where the leader listens.
        self.leader = host, int(port)
        self._connection = socket.create_connection(self.leader, timeout=timeout)
        self._place: Place | None = None

    def say_place(self, place: Place) -> None:
        """Tell the leader this follower's place from now on. OSError if the leader is gone."""
        if place != self._place:
            said = f"{place[0]} {place[1]}"
            ends = _ends(self._connection.getsockname(), self._connection.getpeername())
            signature = self._signer.signature(f"place {self._number} {ends}", said.encode())
            self._connection.sendall(f"{said} {signature.hex()}\n".encode())
            self._place = place

    def close(self) -> None:
        self._connection.close()


def _end(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """One end of a connection, as both machines write it: without the IPv6 scope, which each numbers itself."""
    return f"{address[0].split('%')[0]} {address[1]}"


def _ends(follower: tuple[str, int], leader: tuple[str, int]) -> str:
    return f"{_end(follower)} {_end(leader)}"
