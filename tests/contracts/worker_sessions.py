"""The contract of a worker's sessions, as tests. The test file of a session is a case and an import:

    from tests.contracts.worker_sessions import LeaderContract, SessionCase

    class MyCase(SessionCase): ...      # of a module, so that it can be sent to other processes

    class TestMySession(LeaderContract):
        @pytest.fixture
        def case(self) -> MyCase:
            return MyCase()

A worker's process hosts one session after another, as with ``reuse_actors=True``. The suite drives
sessions as the host of a class trainable does.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import pytest

from fluidtune.elastic import BeginsAnew, LeaderSession, Left
from fluidtune.group_facts import GroupFacts

from .processes import PeerProcess


class SessionCase(ABC):
    """Makes the sessions of one trial. It is pickled: its methods run in the workers' processes."""

    @abstractmethod
    def leader(self, worker: str) -> LeaderSession:
        """The session of a trial that begins anew, with no commit, in use by this process."""

    def set_up(self, session: LeaderSession) -> None:
        """What the trial's code calls of the session's room before its first iteration."""
        return None

    def turn(self, session: LeaderSession, done: int) -> None:
        """One iteration of the leader, from its boundary on; ``done`` iterations were done before it."""
        if session.facts().is_elastic:
            session.boundary(done)

    @abstractmethod
    def put_away(self) -> None:
        """No session is in use by this process any more."""


class _Hosted:
    """The session that this process hosts."""

    case: SessionCase
    session: Any
    turns: int
    threads: set[int | None]


def _host(case: SessionCase, worker: str) -> None:
    _Hosted.threads = {thread.ident for thread in threading.enumerate()}
    _Hosted.case, _Hosted.turns = case, 0
    _Hosted.session = case.leader(worker)
    case.set_up(_Hosted.session)


def _facts() -> GroupFacts:
    facts: GroupFacts = _Hosted.session.facts()
    return facts


def _call(name: str, *args: Any) -> Any:
    return getattr(_Hosted.session, name)(*args)


def _turn() -> str | None:
    """One iteration of the leader; the name of the exception that ended it."""
    try:
        _Hosted.case.turn(_Hosted.session, _Hosted.turns)
    except (Left, BeginsAnew) as error:
        return type(error).__name__
    _Hosted.turns += 1
    return None


def _unload() -> list[str]:
    """End the session as the host does; the threads that it has left behind."""
    session: LeaderSession = _Hosted.session
    session.leave()
    if _facts().is_elastic:
        _turn()
    session.close()
    session.close()
    _Hosted.case.put_away()
    left: list[str] = []
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        left = [thread.name for thread in threading.enumerate() if thread.ident not in _Hosted.threads]
        if not left:
            break
        time.sleep(0.01)
    return left


class Workers:
    """Processes by the worker's name; one that was killed is replaced."""

    def __init__(self) -> None:
        self._peers: dict[str, PeerProcess] = {}
        self._hosting: set[str] = set()

    def __getitem__(self, worker: str) -> PeerProcess:
        return self._peers[worker]

    def host(self, case: SessionCase, worker: str) -> PeerProcess:
        """The worker's process, with a new session in it."""
        if worker not in self._peers or not self._peers[worker].alive:
            self._peers[worker] = PeerProcess()
        self._peers[worker].call(_host, case, worker)
        self._hosting.add(worker)
        return self._peers[worker]

    def unload(self, worker: str) -> None:
        """End the worker's session, and check that its process could serve another trial."""
        self._hosting.discard(worker)
        assert self._peers[worker].call(_unload) == [], "threads left running"

    def end_test(self) -> None:
        """End all sessions."""
        for worker in sorted(self._hosting):
            if self._peers[worker].alive:
                self._peers[worker].call(_unload)
        self._hosting.clear()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


class LeaderContract:
    """What holds for every session."""

    @pytest.fixture
    def case(self) -> Any:
        raise NotImplementedError("define a fixture `case` that returns a SessionCase")

    @pytest.fixture(scope="class")
    @classmethod
    def all_workers(cls) -> Iterator[Workers]:
        workers = Workers()
        yield workers
        workers.close()

    @pytest.fixture
    def workers(self, all_workers: Workers) -> Iterator[Workers]:
        yield all_workers
        all_workers.end_test()

    def test_a_new_leader_is_alone(self, case: SessionCase, workers: Workers) -> None:
        leader = workers.host(case, "w0")
        facts = leader.call(_facts)
        assert facts.width == 1 and not facts.committing

    def test_iterations_resize_nothing(self, case: SessionCase, workers: Workers) -> None:
        leader = workers.host(case, "w0")
        elastic = leader.call(_facts).is_elastic
        for _ in range(3):
            assert leader.call(_turn) is None
            facts = leader.call(_facts)
            assert facts.width == 1
            assert facts.is_elastic >= elastic
            elastic = facts.is_elastic

    def test_without_a_commit_there_is_none_to_go_on_from(self, case: SessionCase, workers: Workers) -> None:
        leader = workers.host(case, "w0")
        for name in ("load_commit", "prefer_checkpoint", "forget_resume", "ended"):
            leader.call(_call, name)
        assert leader.call(_turn) is None

    def test_a_leader_that_is_asked_to_leave_ends_at_its_boundary(self, case: SessionCase, workers: Workers) -> None:
        leader = workers.host(case, "w0")
        assert leader.call(_turn) is None
        leader.call(_call, "leave")
        leader.call(_call, "leave")
        if leader.call(_facts).is_elastic:
            assert leader.call(_turn) in ("Left", None)
        assert not leader.call(_facts).committing
        workers.unload("w0")

    @pytest.mark.parametrize("turns", [0, 2])
    def test_the_process_can_host_another_session(self, turns: int, case: SessionCase, workers: Workers) -> None:
        for _ in range(2):
            leader = workers.host(case, "w0")
            for _ in range(turns):
                assert leader.call(_turn) is None
            workers.unload("w0")
