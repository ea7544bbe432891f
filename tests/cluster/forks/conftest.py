"""Packages written for a test, and a fork server of this machine that has imported them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluidtune.cluster.forks.fork_server import ForkServer, ServerState

#: Where the packages of a test are.
Write = Callable[..., Path]


@pytest.fixture
def packages(tmp_path: Path) -> Write:
    """A function that writes packages, NAME=TEXT, and modules of them, NAME__PART=TEXT. It returns their folder."""
    folder = tmp_path / "site-packages"
    folder.mkdir()

    def write(**modules: str) -> Path:
        for name, text in modules.items():
            package, _, part = name.partition("__")
            (folder / package).mkdir(exist_ok=True)
            (folder / package / f"{part or '__init__'}.py").write_text(text)
        return folder

    return write


class Served:
    """A server, and programs that are started through its launcher."""

    def __init__(self, server: ForkServer, state: ServerState, environment: dict[str, str]) -> None:
        self.server, self.state, self.environment = server, state, environment
        assert state.command is not None, state.why
        self.command = state.command.split()

    def run(self, program: str, tmp_path: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program's text as Ray would run a worker."""
        path = tmp_path / "program.py"
        path.write_text(program)
        return self.start(path, *args, environment=environment)

    def start(self, path: Path, *args: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, str(path), *args],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            cwd=path.parent,
            timeout=60,
        )


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """A function that starts a server with these modules; all of them have ended after the test."""
    servers = []

    def start(folder: Path, *modules: str, **environment: str) -> Served:
        # The server is of these sources, be they installed or not.
        search = f"{folder}{os.pathsep}{Path(__file__).parents[3]}"
        own: dict[str, Any] = {**os.environ, "PYTHONPATH": search, **environment}
        server = ForkServer(list(modules), own)
        servers.append(server)
        return Served(server, server.finish([], {}), own)

    yield start
    for server in servers:
        server.stop()
