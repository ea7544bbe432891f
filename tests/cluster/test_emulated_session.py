"""The emulated session keeps the contract of a worker's session, and counts followers as they come and go."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluidtune.cluster.emulated import EmulatedFollower, EmulatedSession, Emulation
from fluidtune.cluster.emulated.occupancy_board import OccupancyBoard
from fluidtune.elastic import LeaderSession
from fluidtune.profiles import Profile
from tests.contracts.processes import until
from tests.contracts.worker_sessions import LeaderContract, SessionCase


def emulation_in(folder: Path, **widths: float) -> Emulation:
    """Three devices. ``widths``: seconds of an iteration by number of devices, each name with an underscore."""
    (folder / "board").mkdir()
    seconds = {name.strip("_"): each for name, each in widths.items()}
    return Emulation(Profile("p", seconds, {2: 1.5}, memory=0.4), str(folder / "board"))


class EmulatedCase(SessionCase):
    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation

    def leader(self) -> LeaderSession:
        return EmulatedSession(0, self._emulation)

    def turn(self, session: LeaderSession, done: int) -> None:
        super().turn(session, done)
        # What the step of a paced trainable does.
        assert isinstance(session, EmulatedSession)
        session.begin_iteration()
        session.placement()

    def put_away(self) -> None:
        """A session puts itself away when it is closed."""


class TestEmulatedSession(LeaderContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> EmulatedCase:
        return EmulatedCase(emulation_in(tmp_path, _1=1.0, _2=0.6, _3=0.4))


class Group:
    """A leader on device 0, and those that follow it."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self.leader = EmulatedSession(0, emulation)
        self.address = self.leader.facts().address
        self.board = OccupancyBoard(emulation.board)

    def attached(self, device: int) -> multiprocessing.Process:
        """A process that follows on the device, and is attached when this returns."""
        made = multiprocessing.get_context("fork").Process(target=follow, args=(device, self._emulation, self.address))
        made.start()
        assert until(lambda: self.board.count(device) or made.exitcode is not None)
        return made


def follow(device: int, emulation: Emulation, address: object) -> None:
    follower = EmulatedFollower(device, emulation)
    try:
        follower.attach(address)
        follower.run()
    finally:
        follower.close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(emulation_in(tmp_path, _1=1.0, _2=0.6, _3=0.4))
    yield made
    made.leader.close()
    made.leader.close()
    assert made.board.count(0) == 0


def test_followers_count_from_the_next_look_on_and_until_they_go(group: Group) -> None:
    leader = group.leader
    leader.begin_iteration()
    assert leader.facts().calls_modules and leader.facts().width == 1
    one = group.attached(1)
    assert leader.placement() == ((2,), 1) and leader.facts().width == 0, "it changed in the iteration"
    leader.begin_iteration()
    assert leader.facts().width == 2
    other = group.attached(2)
    assert leader.placement() == ((3,), 1)
    group.board.enter(1)
    assert group.board.count(1) == 2
    one.kill()
    one.join()
    assert leader.placement() == ((2,), 1)
    leader.begin_iteration()
    assert leader.facts().width == 2 and group.board.count(1) == 1
    for _ in range(2):
        group.board.leave(1)
        assert group.board.count(1) == 0
    leader.leave()
    other.join(60)
    assert other.exitcode == 0 and group.board.count(2) == 0
    late = group.attached(1)
    late.join(60)
    assert late.exitcode == 1 and leader.placement() == ((1,), 1)


def test_a_trial_goes_on_when_its_board_is_removed(group: Group, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "board")
    group.leader.begin_iteration()
    assert group.leader.placement() == ((1,), 1) and group.leader.facts().width == 1
    group.leader.leave()
    assert group.board.count(0) == 1
