"""The contract of a worker's sessions, as tests. The test file of a session is a case and an import:

    from tests.contracts.worker_sessions import LeaderContract, SessionCase

    class MyCase(SessionCase): ...

    class TestMySession(LeaderContract):
        @pytest.fixture
        def case(self) -> MyCase:
            return MyCase()

A worker's process hosts one session after another, as with ``reuse_actors=True``. The suite drives
sessions as the host of a class trainable does.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fluidtune.elastic import BeginsAnew, LeaderSession, Left

from .processes import until


class SessionCase(ABC):
    """Makes the sessions of one trial."""

    @abstractmethod
    def leader(self) -> LeaderSession:
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


class Hosted:
    """A session that this process hosts."""

    def __init__(self, case: SessionCase) -> None:
        self._case, self._turns, self._threads = case, 0, set(threading.enumerate())
        self.session: LeaderSession = case.leader()
        case.set_up(self.session)

    def turn(self) -> str | None:
        """One iteration of the leader; the name of the exception that ended it."""
        try:
            self._case.turn(self.session, self._turns)
        except (Left, BeginsAnew) as error:
            return type(error).__name__
        self._turns += 1
        return None

    def unload(self) -> None:
        """End the session as the host does; its threads end with it."""
        self.session.leave()
        if self.session.facts().is_elastic:
            self.turn()
        self.session.close()
        self.session.close()
        self._case.put_away()
        until(lambda: not set(threading.enumerate()) - self._threads)


class LeaderContract:
    """What holds for every session."""

    @pytest.fixture
    def case(self) -> Any:
        raise NotImplementedError("define a fixture `case` that returns a SessionCase")

    @pytest.fixture
    def host(self, case: SessionCase) -> Iterator[Callable[[], Hosted]]:
        yield lambda: Hosted(case)
        case.put_away()

    def test_iterations_of_a_leader_that_is_alone_resize_nothing(self, host: Callable[[], Hosted]) -> None:
        leader = host()
        elastic = leader.session.facts().is_elastic
        assert leader.session.facts().width == 1 and not leader.session.facts().committing
        for name in ("load_commit", "prefer_checkpoint", "forget_resume", "ended"):  # there is no commit
            getattr(leader.session, name)()
        for _ in range(3):
            assert leader.turn() is None
            facts = leader.session.facts()
            assert facts.width == 1
            assert facts.is_elastic >= elastic
            elastic = facts.is_elastic
        leader.unload()

    def test_a_leader_that_is_asked_to_leave_ends_at_its_boundary(self, host: Callable[[], Hosted]) -> None:
        leader = host()
        assert leader.turn() is None
        leader.session.leave()
        leader.session.leave()
        if leader.session.facts().is_elastic:
            assert leader.turn() in ("Left", None)
        assert not leader.session.facts().committing
        leader.unload()

    @pytest.mark.parametrize("turns", [0, 2])
    def test_the_process_can_host_another_session(self, turns: int, host: Callable[[], Hosted]) -> None:
        for _ in range(2):
            leader = host()
            for _ in range(turns):
                assert leader.turn() is None
            leader.unload()
