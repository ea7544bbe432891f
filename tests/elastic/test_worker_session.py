"""The elastic session and the lazy one keep the contract of a worker's session."""

from __future__ import annotations

import pytest

from fluidtune import elastic
from fluidtune.elastic import ElasticSession, LazySession, LeaderSession
from fluidtune.group_facts import GroupFacts
from tests.contracts.worker_sessions import LeaderContract, SessionCase


class ElasticCase(SessionCase):
    def leader(self) -> LeaderSession:
        session = ElasticSession(trial="t")
        elastic.use(session)
        return session

    def set_up(self, session: LeaderSession) -> None:
        elastic.prepare()

    def put_away(self) -> None:
        elastic.use(None)


class LazyCase(ElasticCase):
    def leader(self) -> LeaderSession:
        session = LazySession(lambda: ElasticSession(trial="t"))
        elastic.use(session)
        return session


class AsleepCase(LazyCase):
    """A trial whose code never calls `fluidtune.elastic`."""

    def set_up(self, session: LeaderSession) -> None: ...


class TestElasticSession(LeaderContract):
    @pytest.fixture
    def case(self) -> ElasticCase:
        return ElasticCase()


class TestLazySession(LeaderContract):
    @pytest.fixture
    def case(self) -> LazyCase:
        return LazyCase()


class TestLazySessionAsleep(LeaderContract):
    @pytest.fixture
    def case(self) -> AsleepCase:
        return AsleepCase()


def test_a_lazy_session_that_sleeps_has_no_boundaries():
    session = LazySession(lambda: ElasticSession(trial="t"))
    assert session.facts() == GroupFacts()
    with pytest.raises(RuntimeError, match="has not called"):
        session.boundary(0)
