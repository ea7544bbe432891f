"""A forked process is as a new one, in all that it can see of its own state."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fluidtune.cluster.forks.fork_server import ForkServer
from tests.cluster.process_properties import PROPERTIES

pytestmark = pytest.mark.slow


def test_a_forked_process_finds_what_a_new_one_has(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    script = tmp_path / "program.py"
    script.write_text("from tests.cluster.process_properties import print_all\nprint_all()\n")

    def said(program: list[str]) -> dict[str, Any]:
        command = [*program, str(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and not done.stderr, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    new = said([sys.executable])
    server = ForkServer(["torch", "torch._dynamo", "numpy", "pandas", "sklearn", "matplotlib.pyplot"], environment)
    try:
        command = server.finish([], {}).command
        assert command is not None
        forked = said(shlex.split(command))
    finally:
        server.stop()
    assert forked.keys() == PROPERTIES.keys()
    assert {name: forked[name] for name in forked if forked[name] != new[name]} == {}
