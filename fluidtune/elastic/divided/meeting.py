"""How a follower finds its trial's leader, and how both know that the other one has the trial's secret.

The leader listens at a Unix socket that no file leads to and, if its trial may have devices of other machines, at a
port. The driver gives a trial's workers its secret through Ray. Who connects must sign what the leader has drawn, and
the leader what the follower has drawn, before anything is unpickled: by HMAC-SHA256 (RFC 2104). A stranger's connection
is closed. Nothing is hidden: who reads the network reads the values.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

log = logging.getLogger(__name__)

#: Bytes of a secret, of a signature, and of what each side draws. RFC 2104, section 3: a secret is at least as long as
#: the hash's output, which is 32 bytes for SHA-256.
_SIZE = 32
#: Seconds in which who connects must have said who he is. Judgement: it is one exchange of 100 bytes.
_GREETING_S = 10.0
#: The most bytes of a follower's name.
_NAME = 200
#: Connections that may be about to say who they are; others wait in the kernel.
_AT_ONCE = 8


class Refused(Exception):
    """The leader takes no followers; the message says why."""


class Lost(Exception):
    """The other one is gone, or does not answer in time."""


@dataclass(frozen=True)
class Address:
    """Where a leader is found. ``machine``: see `this_machine`. ``port``: for other machines; None: for none."""

    name: str
    machine: str
    port: tuple[str, int] | None = None


def new_secret() -> bytes:
    """A secret for one trial."""
    return secrets.token_bytes(_SIZE)


def _signature(secret: bytes, about: str, value: bytes) -> bytes:
    """What only a holder of the secret can make. ``about``: who signs, and to whom."""
    named = about.encode()
    return hmac.digest(secret, len(named).to_bytes(4, "little") + named + value, "sha256")


def this_machine() -> str:
    """This machine, by what the kernel drew when it started, and the network in which names of sockets are known."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


class Door:
    """The leader's end. ``arrived(connection, name, shared)`` is called in a thread of the door for each follower.

    ``secret``: empty: nobody has it. ``host``: this machine's address for followers on others; None: there are none.
    """

    def __init__(self, secret: bytes, host: str | None, arrived: Callable[[socket.socket, str, bool], None]) -> None:
        self._secret, self._arrived = secret or new_secret(), arrived
        self._warned = False
        self._greeting = threading.Semaphore(_AT_ONCE)
        self._closed = False
        name = f"fluidtune-{secrets.token_hex(16)}"
        local = socket.socket(socket.AF_UNIX)
        local.bind(f"\0{name}")
        local.listen()
        self._doors = [local]
        port = None
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            wide = socket.create_server((host, 0), family=family)
            self._doors.append(wide)
            port = (host, int(wide.getsockname()[1]))
        self.address = Address(name, this_machine(), port)
        for door in self._doors:
            threading.Thread(target=self._listen, args=(door,), name="divided calls", daemon=True).start()

    def _listen(self, door: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = door.accept()
            except OSError:
                if self._closed:
                    return
                threading.Event().wait(0.1)  # no file descriptor is free
                continue
            self._greeting.acquire()
            threading.Thread(target=self._greet, args=(connection,), name="divided calls", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_GREETING_S)
            drawn = secrets.token_bytes(_SIZE)
            connection.sendall(drawn)
            said = _read(connection, _SIZE + _SIZE + 1)
            name = _read(connection, said[-1])
            signature, theirs = said[:_SIZE], said[_SIZE:-1]
            expected = _signature(self._secret, f"follower {self.address.name}", drawn + theirs + name)
            if not hmac.compare_digest(signature, expected):
                if not self._warned:
                    log.warning(
                        "a connection to a trial's leader has not this trial's signature and is closed: a stranger "
                        "reaches the trial's ports (see docs/security.md)"
                    )
                self._warned = True
                connection.close()
                return
            connection.sendall(_signature(self._secret, f"leader {self.address.name}", theirs + drawn))
            connection.settimeout(None)
            shared = connection.family == socket.AF_UNIX
            if not shared:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._arrived(connection, name.decode(errors="replace"), shared)
        except Exception:  # a stranger's, or a follower that has died
            connection.close()
        finally:
            self._greeting.release()

    def close(self) -> None:
        """Take in nobody any more; idempotent."""
        self._closed = True
        for door in self._doors:
            with suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)
            door.close()


def connect(address: Address, secret: bytes, name: str) -> tuple[socket.socket, bool]:
    """The follower's end: a connection to the leader, and whether both are on one machine.

    Raises:
        OSError: there is no leader, or it cannot be reached.
        Refused: it does not take this follower.
    """
    shared = address.machine == this_machine()
    if shared:
        connection = socket.socket(socket.AF_UNIX)
    elif address.port is None:
        raise Refused("its leader is reached from its own machine only")
    else:
        connection = socket.create_connection(address.port, timeout=_GREETING_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        connection.settimeout(_GREETING_S)
        if shared:
            connection.connect(f"\0{address.name}")
        theirs, drawn, said = _read(connection, _SIZE), secrets.token_bytes(_SIZE), name.encode()[:_NAME]
        signature = _signature(secret, f"follower {address.name}", theirs + drawn + said)
        connection.sendall(signature + drawn + bytes([len(said)]) + said)
        answer = _read(connection, _SIZE)
        if not hmac.compare_digest(answer, _signature(secret, f"leader {address.name}", drawn + theirs)):
            raise Refused("who listens there is not the leader of this trial")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection, shared


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            raise ConnectionResetError("the connection was closed")
        found += more
    return found
