"""A trial on emulated devices: its leader, which counts its followers and its neighbours, and a follower.

A follower computes nothing: it holds its device and a connection to the leader. A resize is real in all but the
training: processes come and go, and a worker that dies is noticed by its closed connection. There are no commits: a
trial that lost its leader goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Hashable
from typing import cast

from fluidtune.cluster.emulated.occupancy_board import OccupancyBoard
from fluidtune.cluster.emulated.paced_trainable import Emulation
from fluidtune.elastic import LeaderSession
from fluidtune.elastic.signing import SIGNATURE_SIZE, Signer
from fluidtune.group_facts import GroupFacts
from fluidtune.profiles import DEVICES_PER_NODE

#: The most bytes of a follower's line.
_LINE = 1024
#: Seconds in which a follower must be connected to its leader. Judgement: both are on one machine.
_CONNECT_S = 10.0


class EmulatedSession(LeaderSession):
    """A leader: a `LeaderSession` without commits, and the `EmulatedHost` that the trial's iterations ask.

    One thing: it has the methods of these two protocols.

    ``device``: the number of its emulated device. ``secret``: the trial's, see `Signer`.
    """

    def __init__(self, trial: str, device: int, emulation: Emulation, secret: bytes = b""):
        self.trial = trial
        self._device = device
        self._profile = emulation.profile
        self._signer = Signer(secret)
        self._board = OccupancyBoard(emulation.board, emulation.owner)
        self._closed = False
        #: The device of each follower, by its connection.
        self._followers: dict[socket.socket, int] = {}
        #: The connections that have not said whose they are, each with what has arrived of its line.
        self._unknown: dict[socket.socket, bytes] = {}
        #: The width in the last iteration; 0: it changed meanwhile.
        self._width = 1
        self._server: socket.socket | None = None
        self._board.enter(device)
        if self._profile.widest > 1:
            self._server = socket.create_server(("127.0.0.1", 0))
            self._server.setblocking(False)

    # -- the host's side

    def facts(self) -> GroupFacts:
        grows = self._server is not None
        address = None if self._closed or self._server is None else self._server.getsockname()
        return GroupFacts(address=address, calls_modules=grows, width=self._width)

    def leave(self) -> None:
        """Let go of the followers at once, and of those that come too late."""
        for line in (*self._followers, *self._unknown):
            line.close()
        self._followers.clear()
        self._unknown.clear()
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.leave()
        self._board.leave(self._device)
        self._board.close()

    def boundary(self, done: int) -> None:
        """Nothing to do: there is no commit."""

    # -- the iteration

    def begin_iteration(self) -> None:
        self._look()
        self._width = 1 + len(self._followers)

    def placement(self) -> tuple[tuple[int, ...], int]:
        self._look()
        devices = [self._device, *self._followers.values()]
        nodes = tuple(sorted(Counter(device // DEVICES_PER_NODE for device in devices).values()))
        return nodes, max(1, self._board.count(self._device))

    def _look(self) -> None:
        """Take in the followers that have come, and forget those that have gone. Pauses if one has come."""
        before = set(self._followers)
        self._forget_gone()
        self._accept()
        now = set(self._followers)
        if now - before:
            time.sleep(self._profile.resize)
        if now != before:
            self._width = 0

    def _forget_gone(self) -> None:
        """A follower sends nothing once it has said whose it is: what can be read is the end of its connection."""
        for line in list(self._followers):
            with contextlib.suppress(BlockingIOError):
                with contextlib.suppress(ConnectionError):
                    line.recv(1)
                del self._followers[line]
                line.close()

    def _accept(self) -> None:
        """Take in what followers have sent, without a wait. What comes later is read at the next look."""
        with contextlib.suppress(BlockingIOError):
            while self._server is not None:
                line, _ = self._server.accept()
                line.setblocking(False)
                self._unknown[line] = b""
        for line, before in list(self._unknown.items()):
            try:
                data = line.recv(_LINE)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            said, end, _ = (before + data).partition(b"\n")
            if data and not end and len(said) < _LINE:
                self._unknown[line] = said
                continue
            del self._unknown[line]
            try:
                self._followers[line] = self._device_of(said, line)
            except ValueError:
                self._signer.refuse("a line to the leader of an emulated trial")
                line.close()

    def _device_of(self, said: bytes, line: socket.socket) -> int:
        """The device of the follower that has said this on its connection. ValueError if it is none of this trial."""
        digits = 2 * SIGNATURE_SIZE
        signature, device = bytes.fromhex(said[:digits].decode()), said[digits:]
        if not self._signer.matches(_about(line.getsockname()), device, signature):
            raise ValueError("not signed")
        return int(device)


class EmulatedFollower:
    """Holds its device from its attachment on, until the leader lets go of it. For the arguments see `EmulatedSession`.

    The leader counts it when it looks for the next time.
    """

    def __init__(self, trial: str, device: int, emulation: Emulation, secret: bytes = b""):
        self.trial = trial
        self._device = device
        self._signer = Signer(secret)
        self._board = OccupancyBoard(emulation.board, emulation.owner)
        self._line: socket.socket | None = None
        self._closed = False

    def attach(self, address: Hashable) -> None:
        """Raises OSError if there is no leader at this address."""
        line = self._line = socket.create_connection(cast("tuple[str, int]", address), timeout=_CONNECT_S)
        line.settimeout(None)
        device = str(self._device).encode()
        line.sendall(self._signer.signature(_about(line.getpeername()), device).hex().encode() + device + b"\n")
        self._board.enter(self._device)

    def run(self) -> None:
        """Hold the device until the leader closes the connection, or is dead."""
        if self._line is not None:
            with contextlib.suppress(ConnectionError):
                self._line.recv(1)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._line is not None:
            self._line.close()
        self._board.leave(self._device)
        self._board.close()


def _about(leader: tuple[str, int]) -> str:
    """What a follower's line is about: it counts at one leader only."""
    return f"emulated follower of {leader[1]}"
