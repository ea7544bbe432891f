"""One worker's session of a trial on emulated devices: the trial's workers, its placement and its neighbours.

A follower computes nothing: it holds its device and a connection to the leader. A resize is real in all but the
training: processes join and leave at an iteration's boundary, and a worker that dies is noticed by its closed
connection. There are no commits: a trial that lost a worker goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from fluidtune.cluster.emulated.occupancy_board import OccupancyBoard
from fluidtune.cluster.emulated.paced_trainable import Emulation
from fluidtune.elastic.errors import GroupLost, Left
from fluidtune.elastic.transport.signing import SIGNATURE_SIZE, Signer
from fluidtune.group_facts import GroupFacts, Reform
from fluidtune.profiles import DEVICES_PER_NODE

#: The most bytes of a follower's line.
_LINE = 1024


class EmulatedSession:
    """A `LeaderSession`, a `FollowerSession`, and the `EmulatedHost` that the trial's iterations ask.

    One thing: it has the methods of these three protocols.

    ``device``: the number of the worker's emulated device. ``leader``: this worker runs the trial; else it follows.
    ``secret``: the trial's, see `Signer`.
    """

    def __init__(self, trial: str, worker: str, leader: bool, device: int, emulation: Emulation, secret: bytes = b""):
        self.trial, self.worker, self.leader = trial, worker, leader
        self._last_reform: tuple[float, float] | None = None
        self._device = device
        self._profile = emulation.profile
        self._signer = Signer(secret)
        self._board = OccupancyBoard(emulation.board, emulation.owner)
        self._changed = threading.Condition()
        self._wish: Reform | None = None
        self._leaving = self._ready = self._closed = False
        #: Leader: worker -> (device, connection) of the followers in the group, and of those that have only connected.
        self._followers: dict[str, tuple[int, socket.socket]] = {}
        self._announced: dict[str, tuple[int, socket.socket]] = {}
        #: Leader: the connections that have not said whose they are, each with what has arrived of its line.
        self._unknown: dict[socket.socket, bytes] = {}
        self._server: socket.socket | None = None
        #: Follower: the connection to the leader.
        self._line: socket.socket | None = None
        if leader:
            self._board.enter(device)
            if self._profile.widest > 1:
                self._server = socket.create_server(("127.0.0.1", 0))
                self._server.setblocking(False)

    # -- the host's side

    def facts(self) -> GroupFacts:
        return GroupFacts(
            is_elastic=self._profile.widest > 1,
            address=self._server.getsockname() if self._server is not None else None,
            width=1 + len(self._followers),
            last_reform=self._last_reform,
        )

    def forget_resume(self) -> None:
        """Nothing to do: there is no commit."""

    def prefer_checkpoint(self) -> None:
        """Nothing to do: there is no commit."""

    def ended(self) -> None:
        """Nothing to do: there is no commit."""

    def load_commit(self) -> None:
        """Nothing to do: there is no commit."""

    def fails_divided(self, error: BaseException) -> None:
        """Nothing is divided."""

    def direct(self, reform: Reform) -> None:
        with self._changed:
            self._wish = reform

    def wait_ready(self, timeout: float | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed, timeout)
            return self._ready and not self._closed

    def enter(self, reform: Reform) -> None:
        self.direct(reform)
        with self._changed:
            self._changed.notify_all()

    def leave(self) -> None:
        """A leader dismisses its followers at once."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
        if self.leader:
            for worker in list(self._followers):
                self._dismiss(worker)
        elif self._line is not None:
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self.leader:
            self.leave()
        for line in (*self._unknown, *(line for _, line in self._announced.values())):
            line.close()
        for end in (self._server, self._line):
            if end is not None:
                end.close()
        self._board.leave(self._device)
        self._board.close()

    def boundary(self, done: int) -> None:
        """Nothing to do: the step of every paced trainable calls `begin_iteration`."""

    # -- a follower's loop

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Hold the device until the leader dismisses this worker. ``fn`` is not called."""
        try:
            self._follow()
        finally:
            self.close()
        raise Left(f"worker {self.worker} was dismissed")

    def _follow(self) -> None:
        with self._changed:
            self._ready = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._leaving or self._wish is not None)
            reform = self._wish
        if self._leaving or reform is None:
            return
        try:
            self._line = socket.create_connection(reform.address, timeout=10.0)
            self._line.settimeout(None)
            said = json.dumps([self.worker, self._device]).encode()
            self._line.sendall(self._signer.signature(_about(self._line.getpeername()), said).hex().encode() + said)
            self._line.sendall(b"\n")
            self._board.enter(self._device)
            word = self._line.recv(1)
        except OSError as error:
            if self._leaving:
                return
            raise GroupLost(f"worker {self.worker} lost its leader: {error}") from error
        if not word and not self._leaving:
            raise GroupLost(f"worker {self.worker} lost its leader")

    # -- the leader's iteration

    def begin_iteration(self) -> None:
        """Re-form the group, if it has a wish to follow and all joiners are there."""
        self._check()
        self._accept()
        with self._changed:
            reform = self._wish
            if reform is None or not all(
                name in self._followers or name in self._announced for name in reform.members[1:]
            ):
                return
            self._wish = None
        started = time.perf_counter()
        for worker in [name for name in self._followers if name not in reform.members]:
            self._dismiss(worker)
        for name in reform.members[1:]:
            if name in self._announced:
                self._followers[name] = self._announced.pop(name)
        time.sleep(self._profile.resize)
        self._last_reform = (reform.generation, time.perf_counter() - started)

    def placement(self) -> tuple[tuple[int, ...], int]:
        self._check()
        devices = [self._device, *(device for device, _ in self._followers.values())]
        nodes = tuple(sorted(Counter(device // DEVICES_PER_NODE for device in devices).values()))
        return nodes, max(1, self._board.count(self._device))

    def _accept(self) -> None:
        """Take in what followers have sent, without a wait. What comes later is read at the next boundary."""
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
                self._announced.update(self._follower(said, line))
            except ValueError:
                self._signer.refuse("a line to the leader of an emulated trial")
                line.close()

    def _follower(self, said: bytes, line: socket.socket) -> dict[str, tuple[int, socket.socket]]:
        """The follower that has said this on its connection. ValueError if it is none of this trial."""
        digits = 2 * SIGNATURE_SIZE
        signature, what = bytes.fromhex(said[:digits].decode()), said[digits:]
        if not self._signer.matches(_about(line.getsockname()), what, signature):
            raise ValueError("not signed")
        worker, device = json.loads(what)
        line.setblocking(True)
        return {worker: (int(device), line)}

    def _check(self) -> None:
        """Raise GroupLost if a follower has died.

        A follower sends nothing once it has connected: a connection that has something to read is a closed one.
        """
        lines = {line: worker for worker, (_, line) in self._followers.items()}
        if lines:
            dead, _, _ = select.select(list(lines), [], [], 0)
            if dead:
                raise GroupLost(f"worker {lines[dead[0]]} is gone")

    def _dismiss(self, worker: str) -> None:
        _, line = self._followers.pop(worker)
        with contextlib.suppress(OSError):
            line.sendall(b".")
        line.close()


def _about(leader: tuple[str, int]) -> str:
    """What a follower's line is about: it counts at one leader only."""
    return f"emulated follower of {leader[1]}"
