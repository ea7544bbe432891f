"""Whatever a trial changes in its process, the next one finds it as in a new process, or gets a new process."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluidtune.cluster.forks.fork_server import ForkServer
from tests.cluster.process_properties import DIRTY, PROPERTIES

pytestmark = pytest.mark.slow

#: A module of the user's own, whose state a trial changes.
MODULE = "STATE = []\n\n\ndef answer():\n    return 42\n"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What each property is in a new process, and in one that a trial has left."""
    processes = {}
    for mode in ("fresh", "warm"):
        folder: Path = tmp_path_factory.mktemp(mode)
        (folder / "a_users_module.py").write_text(MODULE)
        (folder / "site-packages").mkdir()
        (folder / "site-packages" / "an_accelerator.py").write_text("STATE = []\n")
        run = f"from tests.cluster import process_properties as p; p.main({mode!r}, {str(folder)!r})"
        # A process of its own: a fork of this one has what other tests have changed.
        processes[mode] = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, text=True)
    yield {mode: json.loads(process.communicate(timeout=120)[0]) for mode, process in processes.items()}


@pytest.mark.parametrize("name", PROPERTIES)
def test_the_next_trial_finds_what_a_new_process_has(found: dict[str, dict[str, Any]], name: str) -> None:
    # docs/bugs.md, 121
    for where in ("thread", "main"):
        why, seen = found["warm"][f"{name} ({where})"]
        if why is None:
            assert seen == found["fresh"][name], where
            assert name not in DIRTY or where == "thread"  # some are of the trial's thread alone
        else:
            assert name in DIRTY, why


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What each property is in a forked process, after another one of its server has changed nearly all of them."""
    folder: Path = tmp_path_factory.mktemp("forked")
    (folder / "a_users_module.py").write_text(MODULE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    server = ForkServer(["torch", "torch._dynamo", "numpy", "pandas", "sklearn", "matplotlib.pyplot"], environment)
    command = server.finish([], {}).command
    assert command is not None
    try:
        said = []
        for what in (f"main('changing', {str(folder)!r})", f"main('fresh', {str(folder)!r})"):
            program = folder / "program.py"
            program.write_text(f"from tests.cluster import process_properties as p\np.{what}\n")
            started = [*shlex.split(command), str(program)]
            done = subprocess.run(started, env=environment, capture_output=True, text=True, timeout=120)
            said.append(done)
        assert said[0].returncode == 0 and said[0].stdout == "changed", said[0].stderr
        assert said[1].returncode == 0 and not said[1].stderr, said[1].stderr
        yield json.loads(said[1].stdout)
    finally:
        server.stop()


def test_a_forked_process_finds_what_a_new_one_has(found: dict[str, dict[str, Any]], forked: dict[str, Any]) -> None:
    fresh = found["fresh"]
    assert {name for name in PROPERTIES if forked[name] != fresh[name]} == set()
