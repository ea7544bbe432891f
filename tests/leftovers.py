"""A pytest plugin: a run of the tests that leaves a process or a file of ours behind fails, and names it.

Each run has its own temporary directory. The processes that it starts inherit the directory as ``TMPDIR``, so they
are found even after their parent has ended. Two runs on one machine do not see each other's processes, and the
processes of pytest-xdist do not find each other's Ray clusters.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import psutil
import pytest

#: Seconds in which everything that the last test started has to end. Ray's agents look for their raylet
#: every few seconds, and the machine may be busy.
PATIENCE_S = 60.0
#: What the names of our temporary files and directories begin with.
PREFIXES = ("fluidtune", "salus", "themis")
#: The directories of the lanes. They lie in shared memory, outside the directory of the run.
LANES = Path("/dev/shm") / f"salus-{os.getuid()}"


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is None:
        # pytest's own directories stay where a developer looks for them.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        # The name is short because the path of a Unix socket, such as Ray's, has at most 107 bytes.
        directory = Path(tempfile.mkdtemp(prefix="ft-"))
        config.pluginmanager.register(Leftovers(directory), "fluidtune-leftovers")
    else:
        # A process of pytest-xdist; the one that started it looks for what both left.
        directory = Path(os.environ["TMPDIR"]) / worker["workerid"]
        directory.mkdir()
    os.environ["TMPDIR"] = str(directory)
    tempfile.tempdir = None


class Leftovers:
    """Looks for leftovers when all tests are done. Keeps the run's directory, with Ray's logs, if a test failed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.found: list[str] = []
        self._failed = False
        self._lanes_before = lane_directories()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed

    # Last: pytest-xdist ends its processes in this hook.
    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        forks = sys.modules.get("fluidtune.cluster.forks.nodes")
        if forks is not None and forks._here is not None:
            forks._here.server.stop()  # it lives as long as its driver, which is this process
        deadline = time.monotonic() + PATIENCE_S
        while True:
            left, paths = processes_of(self.directory), self._paths()
            if not (left or paths) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self.found = [*(f"process {pid}: {command}" for pid, command in left.items()), *map(str, paths)]
        for pid in left:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                process.kill()
                process.wait(PATIENCE_S)
        if self.found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if not self._failed:
            # Last of all at exit: multiprocessing removes directories of its own in there before.
            Finalize(None, shutil.rmtree, args=(self.directory, True), exitpriority=-1000)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.found:
            terminalreporter.section("left behind", red=True, bold=True)
            for one in self.found:
                terminalreporter.line(one)
        if self._failed:
            terminalreporter.line(f"temporary files of this run, Ray's logs among them: {self.directory}")

    def _paths(self) -> list[Path]:
        """Files of ours and directories of lanes that are left."""
        directories = (self.directory, *self.directory.glob("gw*"))
        paths = [
            path
            for directory in directories
            for ours in directory.iterdir()
            if ours.name.startswith(PREFIXES)
            for path in (ours, *ours.rglob("*"))
            if not path.is_dir()
        ]
        new = lane_directories() - self._lanes_before
        return paths + [path for path in sorted(new) if not used_elsewhere(path, self.directory)]


def lane_directories() -> set[Path]:
    return set(LANES.iterdir()) if LANES.exists() else set()


def processes_of(directory: Path) -> dict[int, str]:
    """Process id and command line of each living process that belongs to the run with this directory."""
    own = psutil.Process()
    below = {child.pid for child in own.children(recursive=True)}
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            ends_with_this_one = process.ppid() == own.pid and "from multiprocessing." in command
            if process == own or ends_with_this_one or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid in below or belongs_to(process, directory):
                found[process.pid] = command[:200]
    return found


def belongs_to(process: psutil.Process, directory: Path) -> bool:
    """Whether the process inherited ``directory`` as TMPDIR, is told of it, or has one of its files open.

    Ray's workers and agents overwrite their environment and command line with a title, but they keep their logs open.
    """
    return (
        process.environ().get("TMPDIR", "").startswith(str(directory))
        or str(directory) in " ".join(process.cmdline())
        or any(file.path.startswith(str(directory)) for file in process.open_files())
    )


def used_elsewhere(path: Path, directory: Path) -> bool:
    """Whether a living process that does not belong to the run uses the directory of lanes."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            told = str(path) in " ".join(process.cmdline())
            if (told or any(m.path.startswith(str(path)) for m in process.memory_maps())) and not belongs_to(
                process, directory
            ):
                return True
    return False
