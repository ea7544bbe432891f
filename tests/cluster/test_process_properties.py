"""Whatever a trial changes in its process, a later process of the same fork server is as a new one."""

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

#: A module of the user's own, whose state a trial changes.
MODULE = "STATE = []\n\n\ndef answer():\n    return 42\n"


def test_a_forked_process_finds_what_a_new_one_has(tmp_path: Path) -> None:
    """Seen: 36 of 48 properties of a process leaked into the next trial."""
    (tmp_path / "a_users_module.py").write_text(MODULE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def said(program: list[str], what: str) -> str:
        """What a process says that runs a function of `process_properties`."""
        script = tmp_path / "program.py"
        script.write_text(f"from tests.cluster import process_properties as p\np.{what}({str(tmp_path)!r})\n")
        started = [*program, str(script)]
        done = subprocess.run(started, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout

    new: dict[str, Any] = json.loads(said([sys.executable], "print_all"))
    server = ForkServer(["torch", "torch._dynamo", "numpy", "pandas", "sklearn", "matplotlib.pyplot"], environment)
    try:
        command = server.finish([], {}).command
        assert command is not None
        assert said(shlex.split(command), "change_everything") == "changed"
        forked = json.loads(said(shlex.split(command), "print_all"))
    finally:
        server.stop()
    assert forked.keys() == PROPERTIES.keys()
    assert {name: forked[name] for name in forked if forked[name] != new[name]} == {}
