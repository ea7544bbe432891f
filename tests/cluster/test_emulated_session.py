"""The emulated session keeps the contract of a worker's session."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from fluidtune.cluster import emulated
from fluidtune.cluster.emulated import EmulatedSession, Emulation
from fluidtune.cluster.emulated.occupancy_board import OccupancyBoard
from fluidtune.elastic import FollowerSession, GroupLost, LeaderSession, Reform
from fluidtune.profiles import Profile
from tests.contracts.worker_sessions import GroupContract, LeaderContract, SessionCase


class EmulatedCase(SessionCase):
    """Worker "w1" is on device 1, and so on. ``widths``: seconds by number of devices."""

    def __init__(self, folder: Path, widths: dict[str, float]) -> None:
        board = folder / "board"
        OccupancyBoard.create(board, 3)
        self._emulation = Emulation(Profile("p", widths, {2: 1.5}, memory=0.4, resize=0.0), str(board))

    def _session(self, worker: str, leader: bool) -> EmulatedSession:
        session = EmulatedSession("t", worker, leader, int(worker[1:]), self._emulation)
        emulated.use_host(session)
        return session

    def leader(self, worker: str) -> LeaderSession:
        return self._session(worker, leader=True)

    def follower(self, worker: str) -> FollowerSession:
        return self._session(worker, leader=False)

    def turn(self, session: LeaderSession, done: int) -> None:
        super().turn(session, done)
        # What the step of a paced trainable does.
        assert isinstance(session, EmulatedSession)
        session.begin_iteration()
        session.placement()

    def put_away(self) -> None:
        emulated.use_host(None)


@pytest.mark.slow
class TestEmulatedSession(GroupContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> EmulatedCase:
        return EmulatedCase(tmp_path, {"1": 1.0, "2": 0.6, "3": 0.4})


class TestEmulatedSessionOfOneDevice(LeaderContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> EmulatedCase:
        return EmulatedCase(tmp_path, {"1": 1.0})


def test_a_worker_that_is_not_of_the_trial_is_not_taken_in(tmp_path: Path) -> None:
    case = EmulatedCase(tmp_path, {"1": 1.0, "2": 0.6})
    leader = case._session("w1", leader=True)
    stranger = EmulatedSession("t", "w2", False, 2, case._emulation, secret=b"another secret")
    address = leader.facts().address
    assert address is not None
    reform = Reform(1, ("w1", "w2"), address)
    leader.direct(reform)
    stranger.enter(reform)
    thread = threading.Thread(target=lambda: stopped.append(type(stranger_error(stranger))), daemon=True)
    stopped: list[type] = []
    with socket.create_connection(address) as silent:
        thread.start()
        deadline = time.monotonic() + 60
        while not stopped and time.monotonic() < deadline:
            leader.begin_iteration()  # nobody waits for the one that says nothing
            time.sleep(0.01)
        silent.sendall(b"[" * 5000)
        while leader._signer.refused < 2 and time.monotonic() < deadline:
            leader.begin_iteration()
    thread.join(60)
    assert stopped == [GroupLost] and leader.facts().width == 1 and leader._signer.refused == 2
    leader.close()
    emulated.use_host(None)


def stranger_error(session: EmulatedSession) -> BaseException | None:
    try:
        session.run(lambda: None)
    except BaseException as error:
        return error
    return None
