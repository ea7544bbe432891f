"""Starts a fork server on this machine and hears from it; used by the actor that each node of a job has.

The server is no child of the process that starts it, because Ray ends the children of a worker with the worker, before
they could tidy up. It ends when it can read no more from the pipe that this process holds.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluidtune.cluster import held_folders
from fluidtune.cluster.forks import fork_launcher, server
from fluidtune.cluster.forks.fork_launcher import PREFIX, SOCKET
from fluidtune.cluster.held_folders import hold, open_in

#: The longest path of a socket, in bytes: ``sun_path`` of Linux's unix(7), less its end.
_LONGEST = 107
#: The name of the file by which a server holds its folder.
_LOCK = "socket.lock"


@dataclass(frozen=True)
class ServerState:
    """What became of a server. ``command``: Ray's ``py_executable`` for its children; None: it starts none.

    ``why``: why it starts none. ``failed``: modules that could not be imported, and why. ``pid``: its process.
    ``modules``: how many it has.
    """

    command: str | None
    why: str | None = None
    failed: dict[str, str] = field(default_factory=dict)
    pid: int | None = None
    modules: int = 0


class ForkServer:
    """One server. It imports ``modules`` in an environment like that of the processes that it is to fork.

    ``folder``: where its socket is to be; None: in a new one.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], folder: str | None = None) -> None:
        self._given = folder
        self._orders: list[tuple[list[str], dict[str, str]]] = [(list(modules), dict(environment))]
        self._process: subprocess.Popen[str] | None = None
        self._folder = ""
        self._state = ServerState(None, "it is starting")

    def begin(self) -> None:
        """Have it import the modules, from now on.

        Raises:
            OSError: it cannot be started.
        """
        sweep()
        if self._given is not None:
            os.makedirs(self._given, mode=0o700, exist_ok=True)
        self._folder = self._given or new_folder()
        path = socket_in(self._folder)
        if len(path.encode()) > _LONGEST:
            shutil.rmtree(self._folder, ignore_errors=True)  # it may be a link of somebody else's
            raise OSError(f"the path {path} is too long for a socket; set TMPDIR to a shorter one")
        with hold(self._folder, _LOCK) as lock, open_in(self._folder, "log") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(server.__file__)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd="/",
                env=self._orders[0][1],
                pass_fds=[lock.fileno()],  # the lock is the server's from now on, until it has ended
            )
            number = lock.fileno()
        self._process.wait()  # the server itself has left it
        self._say({"path": path, "lock": number})
        self._order(0, last=False)

    def _say(self, line: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()

    def _order(self, number: int, last: bool) -> None:
        names, environment = self._orders[number]
        self._say({"names": names, "environment": environment, "last": last})

    def finish(self, modules: Sequence[str], environment: Mapping[str, str]) -> ServerState:
        """Have it import these modules as well, with these further variables, and wait until it is ready.

        Whatever goes wrong is in the answer.
        """
        self._orders.append((list(modules), dict(environment)))
        try:
            if self._process is None:
                self.begin()
            self._order(1, last=True)
            self._state = self._heard()
        except OSError as error:
            self._state = ServerState(None, str(error))
        return self._state

    def _heard(self) -> ServerState:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        said: dict[str, Any] = json.loads(line) if line else {}
        if "ready" in said:
            path = socket_in(self._folder)
            command = shlex.join([sys.executable, "-I", "-S", str(fork_launcher.__file__), path])
            return ServerState(command, None, said["failed"], said["pid"], said["ready"])
        last = Path(self._folder, "log").read_text(errors="replace").strip().splitlines()[-1:] or ["it ended"]
        self.stop()
        return ServerState(None, said.get("unfit", f"it died while it imported: {last[0]}"))

    def wait(self) -> str:
        """Wait for the end of the server that has started. Returns in words how it came."""
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.read()
        return "the fork server has ended"

    def stop(self) -> None:
        """Let it end. Its children live on. Returns when nothing of it is left on disk."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with suppress(OSError):
                process.stdin.close()
            with suppress(OSError, ValueError):
                process.stdout.read()
            process.stdout.close()
            shutil.rmtree(self._folder, ignore_errors=True)


def new_folder() -> str:
    """A new folder for a server's files, which no other user can enter."""
    return tempfile.mkdtemp(prefix=PREFIX)


def socket_in(folder: str) -> str:
    """The path of the server's socket in its folder."""
    return os.path.join(folder, SOCKET)


def sweep() -> None:
    """Remove what servers of this user have left here that were killed together with the processes that held them."""
    held_folders.sweep(PREFIX, _LOCK)
