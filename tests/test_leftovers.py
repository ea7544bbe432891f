"""A run of the tests that leaves a process or a file of ours behind fails and names it; the process is ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from tests.leftovers import LANES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

CONFTEST = """
import tests.leftovers
tests.leftovers.PATIENCE_S = 0.5
pytest_plugins = ["tests.leftovers"]
"""

#: Processes that sleep: a child, one whose parent has ended, and one that has cleared its environment but has a file
#: open, as Ray's workers do.
PROCESSES = """
import os, subprocess, sys, tempfile, time

def sleeper(**more):
    print("started", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **more).pid)

def test_child():
    sleeper()

def test_orphan():
    if os.fork() == 0:
        sleeper(start_new_session=True)
        os._exit(0)
    os.wait()

def test_cleared():
    if os.fork() == 0:
        with open(os.path.join(tempfile.gettempdir(), "log"), "w") as log:
            sleeper(start_new_session=True, env={}, stderr=log)
        os._exit(0)
    os.wait()
"""

FILES = """
import os, tempfile

def test_files():
    open(os.path.join(tempfile.gettempdir(), "fluidtune-forgotten"), "w").close()
    os.makedirs({lanes!r})
"""


def run(directory: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "--rootdir", str(directory), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, "test_it.py"], cwd=directory, env=environment, capture_output=True, text=True, timeout=60
    )


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_processes(options: tuple[str, ...], tmp_path: Path) -> None:
    done = run(tmp_path, PROCESSES, *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    named = [int(pid) for pid in re.findall(r"^process (\d+): .*time\.sleep", done.stdout, re.MULTILINE)]
    assert len(named) == 3, done.stdout
    assert not any(map(alive, named))


def test_files(tmp_path: Path) -> None:
    lanes = LANES / f"test-{uuid.uuid4().hex[:8]}"
    done = run(tmp_path, FILES.format(lanes=str(lanes)))
    lanes.rmdir()
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^/.*/fluidtune-forgotten$", done.stdout, re.MULTILINE)
    assert str(lanes) in done.stdout
