"""Holds the data sets of a job on one node, in a thread of the driver or of an actor that lives as long as the job.

It listens at an abstract Unix socket (unix(7)), which has no file: nothing is left when the process is killed. It holds
open files in memory and never reads them. A message to it is a length (8 bytes) and JSON: ``{"data": KEY}``, which it
answers with ``{"load": true}`` or with the file; ``{"loaded": true}`` with a file, answered with ``{"kept": true}``.

Processes that a loading process has forked have its connection, too, and keep it open when that one is killed. So the
end of the process itself is watched as well, by its pidfd (Linux 5.3).
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from fluidtune.cluster.data.kept_data import KeptData

#: The environment variable that names the socket of a worker's node.
VARIABLE = "FLUIDTUNE_DATA"
#: The name of the files, in the lists of a process' mappings.
NAME = "memfd:fluidtune-shared"
#: What a message begins with: the length of the rest.
HEAD = struct.Struct("Q")
#: Seconds that it sleeps when there is no descriptor for another connection: its listener stays ready. Who asks waits.
_FULL_S = 0.1
#: The longest message, in bytes: a key is a SHA-256 in hexadecimal.
_LONGEST = 1024


@dataclass(eq=False)
class _Asker:
    """One connection, what it has sent of a message, and the file that came with it.

    ``process``: the pidfd of the process that has connected; None: this system has none, or the process has ended.
    """

    connection: socket.socket
    process: int | None
    said: bytearray = field(default_factory=bytearray)
    files: list[int] = field(default_factory=list)


class DataKeeper:
    """See the module. ``name``: of the socket.

    Raises:
        OSError: there is such a socket already, or this system has none.
    """

    def __init__(self, name: str) -> None:
        self._data = KeptData[_Asker]()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{name}")
        self._listener.listen(512)  # more processes than a job starts on a node at a time
        self._wake, self._awake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="shared-data", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of all data sets. Processes that have mapped one keep it."""
        self._awake.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data.connection.fileno() < 0:
                    continue  # it was closed in this round
                elif key.fileobj is key.data.connection:
                    self._hear(key.data)
                else:
                    self._lost(key.data)

    def _end(self) -> None:
        for who in {key.data for key in self._selector.get_map().values() if key.data is not None}:
            self._close(who)
        for file in self._data.files():
            os.close(file)
        self._selector.close()
        self._listener.close()
        self._wake.close()

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()[0]
        except OSError:
            time.sleep(_FULL_S)
            return
        with suppress(OSError):
            if peer(connection) != os.geteuid():
                connection.close()
                return
            who = _Asker(connection, _process_at(connection))
            self._selector.register(connection, selectors.EVENT_READ, who)
            if who.process is not None:
                self._selector.register(who.process, selectors.EVENT_READ, who)

    def _hear(self, who: _Asker) -> None:
        try:
            data, files, _, _ = socket.recv_fds(who.connection, 1 << 16, 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data, files = b"", []
        who.files += files
        who.said += data
        try:
            length = HEAD.unpack_from(who.said)[0] if len(who.said) >= HEAD.size else 0
            if not data or length > _LONGEST:
                self._lost(who)
            elif length and len(who.said) >= HEAD.size + length:
                message = json.loads(bytes(who.said[HEAD.size :]))
                who.said.clear()
                self._take(who, message)
        except (ValueError, KeyError, TypeError):  # no message of `shared_data`
            self._lost(who)

    def _take(self, who: _Asker, message: dict[str, str]) -> None:
        if "data" in message:
            load, file = self._data.asked(message["data"], who)
            if load:
                self._answer(who, {"load": True})
            elif file is not None:
                self._hand(who, file)
            return
        (file,) = who.files
        waiting = self._data.loaded(who, file)
        who.files.clear()
        self._answer(who, {"kept": True})
        for each in waiting:
            self._hand(each, file)

    def _answer(self, who: _Asker, answer: dict[str, bool]) -> None:
        with suppress(OSError):
            who.connection.sendall(json.dumps(answer).encode())

    def _hand(self, who: _Asker, file: int) -> None:
        with suppress(OSError):
            socket.send_fds(who.connection, [b"{}"], [file])

    def _lost(self, who: _Asker) -> None:
        self._selector.unregister(who.connection)
        if who.process is not None:
            self._selector.unregister(who.process)
        self._close(who)
        heir = self._data.lost(who)
        if heir is not None:
            self._answer(heir, {"load": True})

    @staticmethod
    def _close(who: _Asker) -> None:
        who.connection.close()
        for file in who.files if who.process is None else [*who.files, who.process]:
            os.close(file)


def peer(connection: socket.socket) -> int:
    """The user id of the process at the other end."""
    return _credentials(connection)[1]


def _process_at(connection: socket.socket) -> int | None:
    with suppress(OSError):
        return os.pidfd_open(_credentials(connection)[0])
    return None


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process id, user id and group id of the process at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", found)  # type: ignore[return-value]
