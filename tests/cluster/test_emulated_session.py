"""The emulated session keeps the contract of a worker's session, and counts followers as they come and go."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluidtune.cluster import emulated
from fluidtune.cluster.emulated import EmulatedFollower, EmulatedSession, Emulation
from fluidtune.cluster.emulated.occupancy_board import OccupancyBoard
from fluidtune.elastic import LeaderSession
from fluidtune.profiles import Profile
from tests.contracts.processes import until
from tests.contracts.worker_sessions import LeaderContract, SessionCase

#: Seconds that a growth stops the trial for.
PAUSE_S = 0.05


def emulation_in(folder: Path, **widths: float) -> Emulation:
    """Three devices. ``widths``: seconds of an iteration by number of devices, each name with an underscore."""
    OccupancyBoard.create(folder / "board", 3)
    seconds = {name.strip("_"): each for name, each in widths.items()}
    return Emulation(Profile("p", seconds, {2: 1.5}, memory=0.4, resize=PAUSE_S), str(folder / "board"))


class EmulatedCase(SessionCase):
    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation

    def leader(self, worker: str) -> LeaderSession:
        session = EmulatedSession("t", int(worker[1:]), self._emulation)
        emulated.use_host(session)
        return session

    def turn(self, session: LeaderSession, done: int) -> None:
        super().turn(session, done)
        # What the step of a paced trainable does.
        assert isinstance(session, EmulatedSession)
        session.begin_iteration()
        session.placement()

    def put_away(self) -> None:
        emulated.use_host(None)


class TestEmulatedSession(LeaderContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> EmulatedCase:
        return EmulatedCase(emulation_in(tmp_path, _1=1.0, _2=0.6, _3=0.4))


class TestEmulatedSessionOfOneDevice(LeaderContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> EmulatedCase:
        return EmulatedCase(emulation_in(tmp_path, _1=1.0))


class Group:
    """A leader on device 0, and those that follow it."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self.leader = EmulatedSession("t", 0, emulation, b"secret")
        self.address = self.leader.facts().address
        self.board = OccupancyBoard(emulation.board)

    def attached(self, device: int, secret: bytes = b"secret") -> tuple[EmulatedFollower, threading.Thread]:
        follower = EmulatedFollower("t", device, self._emulation, secret)
        follower.attach(self.address)
        thread = threading.Thread(target=lambda: (follower.run(), follower.close()), daemon=True)
        thread.start()
        return follower, thread


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
    one, thread = group.attached(1)
    until(lambda: leader.placement() == ((2,), 1))
    assert group.board.count(1) == 1 and leader.facts().width == 0, "it changed in the iteration"
    leader.begin_iteration()
    assert leader.facts().width == 2
    _, other = group.attached(2)
    until(lambda: leader.placement() == ((3,), 1))
    assert one._line is not None
    one._line.shutdown(socket.SHUT_RDWR)  # as if its process had died
    thread.join(60)
    until(lambda: leader.placement() == ((2,), 1))
    leader.begin_iteration()
    assert leader.facts().width == 2 and group.board.count(1) == 0
    leader.leave()
    other.join(60)
    assert not other.is_alive() and group.board.count(2) == 0
    with pytest.raises(OSError):
        group.attached(1)


def test_the_trial_stops_once_when_a_follower_has_come(group: Group) -> None:
    group.attached(1)
    deadline, began = time.monotonic() + 60, time.monotonic()
    while group.leader.placement()[0] == (1,) and time.monotonic() < deadline:
        began = time.monotonic()
    assert time.monotonic() - began >= PAUSE_S
    began = time.monotonic()
    group.leader.placement()
    assert time.monotonic() - began < PAUSE_S


def test_a_worker_that_is_not_of_the_trial_does_not_count(group: Group) -> None:
    address = group.leader.facts().address
    assert isinstance(address, tuple)
    with socket.create_connection(address) as silent:
        _, stranger = group.attached(1, b"another secret")
        until(lambda: (group.leader.begin_iteration(), not stranger.is_alive())[1])  # nobody waits for the silent one
        silent.sendall(b"[" * 5000)
        until(lambda: (group.leader.begin_iteration(), group.leader._signer.refused == 2)[1])
    assert group.leader.facts().width == 1


def test_a_trial_of_one_device_listens_nowhere(tmp_path: Path) -> None:
    leader = EmulatedSession("t", 0, emulation_in(tmp_path, _1=1.0))
    assert leader.facts().address is None and not leader.facts().calls_modules
    leader.close()
