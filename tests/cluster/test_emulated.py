"""Emulated devices without Ray: which trial is where, how long iterations last."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from fluidtune.cluster.emulated import Emulation
from fluidtune.cluster.emulated.occupancy_board import PREFIX, OccupancyBoard
from fluidtune.cluster.emulated.paced_trainable import keep_pace
from fluidtune.profiles import Profile
from salus_share.errors import SalusError
from tests.contracts.processes import python
from tests.salus.processes import as_another_user


@pytest.fixture
def emulation(tmp_path: Path) -> Emulation:
    (tmp_path / "board").mkdir()
    return Emulation(Profile("p", {"1": 1.0, "2": 0.6}, {2: 1.5}, memory=0.4), str(tmp_path / "board"))


class Place:
    """A trial whose neighbours come and go at given times of a clock that only sleeping moves."""

    def __init__(self, *changes: tuple[float, int]):
        self.now, self.changes = 0.0, list(changes)

    def begin_iteration(self) -> None: ...

    def placement(self) -> tuple[tuple[int, ...], int]:
        return (1,), [count for since, count in self.changes if since <= self.now + 1e-9][-1]

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


@pytest.mark.parametrize(
    "changes, lasts",
    [([(0.0, 1)], 1.0), ([(0.0, 2)], 1.5), ([(0.0, 1), (0.5, 2)], 0.5 + 0.5 * 1.5), ([(0.0, 2), (0.75, 1)], 1.25)],
)
def test_an_iteration_lasts_what_the_neighbours_leave(changes: list, lasts: float, emulation: Emulation):
    host = Place(*changes)
    keep_pace(emulation.profile, 1.0, host, 0.0, clock=lambda: host.now, sleep=host.sleep)
    assert host.now == pytest.approx(lasts, abs=0.06)


def test_what_does_not_fit_the_memory_fails_as_on_a_gpu(emulation: Emulation):
    host = Place((0.0, 3))
    with pytest.raises(MemoryError, match=r"3 trials of 0\.4"):
        keep_pace(emulation.profile, 1.0, host, 0.0, clock=lambda: host.now, sleep=host.sleep)


def test_an_emulated_worker_imports_no_torch():
    python("-c", "import sys, fluidtune.cluster.hosting.worker; sys.exit('torch' in sys.modules)")


def test_a_board_of_another_user_is_refused_unless_it_is_the_drivers(tmp_path, monkeypatch):
    mine = os.geteuid()
    path = tmp_path / "board"
    path.mkdir(0o755)
    OccupancyBoard(path)
    assert path.stat().st_mode & 0o077 == 0
    as_another_user(monkeypatch)
    with pytest.raises(SalusError, match=r"board belongs to .*: have .* remove it, it is not used"):
        OccupancyBoard(path)
    OccupancyBoard(path, owner=mine)


def test_the_board_of_a_driver_that_was_killed_is_removed_and_no_other_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, mine = tmp_path / f"{PREFIX}{ended.pid}-abc", OccupancyBoard.of_this_driver()
    others = [tmp_path / f"{PREFIX}old", tmp_path / f"{PREFIX}{os.getppid()}-abc"]
    for path in (dead, *others):
        path.mkdir()
        (path / "1-0-17").touch()
    (tmp_path / f"{PREFIX}{ended.pid}-older").touch()  # boards were files
    new = OccupancyBoard.of_this_driver()
    assert {*map(Path, (mine, new)), *others} == set(tmp_path.iterdir())
