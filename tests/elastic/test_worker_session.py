"""The elastic session and the lazy one keep the contract of a worker's session."""

from __future__ import annotations

import pytest

from fluidtune import elastic
from fluidtune.elastic import ElasticSession, FollowerSession, LazySession, LeaderSession
from fluidtune.elastic.transport import TorchBackend
from fluidtune.group_facts import GroupFacts
from tests.contracts.worker_sessions import GroupContract, LeaderContract, SessionCase


def _session(worker: str, leader: bool) -> ElasticSession:
    return ElasticSession(trial="t", worker=worker, leader=leader, backend=TorchBackend())


class ElasticCase(SessionCase):
    def leader(self, worker: str) -> LeaderSession:
        session = _session(worker, leader=True)
        elastic.use(session)
        return session

    def follower(self, worker: str) -> FollowerSession:
        session = _session(worker, leader=False)
        elastic.use(session)
        return session

    def set_up(self, session: LeaderSession) -> None:
        elastic.prepare()

    def follow(self, session: FollowerSession) -> None:
        here = elastic.current()
        assert here is not None
        while True:
            here.boundary()

    def put_away(self) -> None:
        elastic.wake_on_first_use(None)
        elastic.use(None)


class LazyCase(ElasticCase):
    def leader(self, worker: str) -> LeaderSession:
        session = LazySession(lambda: _session(worker, leader=True))
        elastic.wake_on_first_use(session)
        return session


class AsleepCase(LazyCase):
    """A trial whose code never calls `fluidtune.elastic`."""

    def set_up(self, session: LeaderSession) -> None: ...


class TestElasticSession(GroupContract):
    @pytest.fixture
    def case(self) -> ElasticCase:
        return ElasticCase()


class TestLazySession(GroupContract):
    @pytest.fixture
    def case(self) -> LazyCase:
        return LazyCase()


class TestLazySessionAsleep(LeaderContract):
    @pytest.fixture
    def case(self) -> AsleepCase:
        return AsleepCase()


def test_a_lazy_session_that_sleeps_cannot_be_resized():
    session = LazySession(lambda: _session("w0", leader=True))
    assert session.facts() == GroupFacts()
    with pytest.raises(RuntimeError, match="has not called"):
        session.boundary(0)
