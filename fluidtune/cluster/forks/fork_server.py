"""Starts a fork server on this machine and hears from it; used by the actor that each node of a job has.

The server is no child of the process that starts it, because Ray ends the children of a worker with the worker, before
they could tidy up. It ends when it can read no more from the pipe that this process holds.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fluidtune.cluster.forks import fork_launcher, server
from fluidtune.cluster.forks.fork_launcher import DIGITS, PREFIX

#: The most bytes of what a server has said before it died that are looked at.
_LAST_WORDS = 1 << 16


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

    ``name``: its socket's; None: a new one.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], name: str | None = None) -> None:
        self._name = name or new_name()
        self._modules, self._environment = modules, dict(environment)
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def begin(self) -> None:
        """Have it import the modules, from now on, unless it was stopped.

        Raises:
            OSError: it cannot be started.
        """
        if self._stopped:
            return
        # What it prints is in memory without a name: it needs no disk.
        self._log = os.fdopen(os.memfd_create("fluidtune-forks"), "rb")
        process = self._process = subprocess.Popen(
            [sys.executable, str(server.__file__), self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd="/",
            env=self._environment,
        )
        process.wait()  # the server itself has left it
        if self._stopped:  # while it was started
            self.stop()
        _order(process, self._modules, self._environment, last=False)

    def finish(self, modules: Sequence[str], environment: Mapping[str, str]) -> ServerState:
        """Have it import these modules as well, with these further variables, and wait until it is ready.

        Whatever goes wrong is in the answer.
        """
        try:
            if self._process is None:
                self.begin()
            process = self._process
            if process is None:
                return ServerState(None, "it was stopped")
            _order(process, modules, environment, last=True)
            return self._heard(process)
        except (OSError, ValueError) as error:  # ValueError: `stop` has closed the pipes meanwhile
            return ServerState(None, str(error))

    def _heard(self, process: subprocess.Popen[str]) -> ServerState:
        assert process.stdout is not None
        line = process.stdout.readline()
        said: dict[str, Any] = {}
        with suppress(json.JSONDecodeError):  # it said nothing, or not all of it
            said = json.loads(line)
        if "ready" in said:
            command = shlex.join([sys.executable, "-I", "-S", str(fork_launcher.__file__), self._name])
            return ServerState(command, None, said["failed"], said["pid"], said["ready"])
        last = max(0, os.fstat(self._log.fileno()).st_size - _LAST_WORDS)
        words = os.pread(self._log.fileno(), _LAST_WORDS, last).decode(errors="replace").strip().splitlines()
        self.stop()
        return ServerState(None, said.get("unfit", f"it died while it imported: {(words or ['it ended'])[-1]}"))

    def wait(self) -> str:
        """Wait for the end of the server that has started. Returns in words how it came."""
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.read()
        return "the fork server has ended"

    def stop(self) -> None:
        """Let it end, and wait for that; it never begins again. Its children live on.

        Any thread, also while it begins.
        """
        self._stopped = True
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with suppress(OSError):
                process.stdin.close()
            with suppress(OSError, ValueError):
                process.stdout.read()
            process.stdout.close()
            self._log.close()


def _order(process: subprocess.Popen[str], names: Sequence[str], environment: Mapping[str, str], last: bool) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ValueError):  # ValueError: `stop` has closed it
        order = {"names": list(names), "environment": dict(environment), "last": last}
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()


def new_name() -> str:
    """The name of a socket that no other server has."""
    return PREFIX + secrets.token_hex(DIGITS // 2)
