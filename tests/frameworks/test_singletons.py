"""What a trial changes in the singletons of libraries is not there in the next process, as in a new one."""

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
from tests.frameworks.singletons import SINGLETONS, there

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parent / "singletons.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """By process, what it sees: a plain one, one that has changed everything, and forked ones before and after one."""
    folder = tmp_path_factory.mktemp("singletons")
    environment = {**os.environ, "WANDB_DIR": str(folder), "MPLBACKEND": "agg", "KERAS_BACKEND": "torch"}
    server = ForkServer(sorted({name.rpartition(".")[0] for name in SINGLETONS if there(name)}), environment)
    command = server.finish([], {}).command
    assert command is not None

    def of(program: list[str]) -> dict[str, Any]:
        done = subprocess.run(program, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "fluidtune: a plain" not in done.stderr, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    forked, plain = [*shlex.split(command), str(PROGRAM)], [sys.executable, str(PROGRAM)]
    try:
        found = {"plain": of([*plain, "see"]), "before": of([*forked, "see"])}
        of([*forked, "change"])
        both = folder / "both.py"
        both.write_text(
            f"import runpy, sys\nm = runpy.run_path({str(PROGRAM)!r})\nm['main']('change')\nm['main']('see')\n"
        )
        yield found | {"changed": of([sys.executable, str(both)]), "after": of([*forked, "see"])}
    finally:
        server.stop()


@pytest.mark.parametrize("name", SINGLETONS)
def test_the_singleton_is_as_in_a_new_process(seen: dict[str, dict[str, Any]], name: str) -> None:
    if not there(name):
        pytest.skip(f"needs {name.partition('.')[0]}: pip install -r benchmarks/frameworks/requirements.txt")
    assert seen["before"][name] == seen["after"][name] == seen["plain"][name]
    assert seen["changed"][name] != seen["plain"][name], "nothing was changed"
