"""The elastic session and the lazy one keep the contract of a worker's session."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

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


class TestSessions(LeaderContract):
    @pytest.fixture(params=[ElasticCase, LazyCase, AsleepCase])
    def case(self, request: pytest.FixtureRequest) -> ElasticCase:
        made: ElasticCase = request.param()
        return made


def test_a_lazy_session_that_sleeps_has_no_boundaries():
    session = LazySession(lambda: ElasticSession(trial="t"))
    assert session.facts() == GroupFacts()
    with pytest.raises(RuntimeError, match="has not called"):
        session.boundary(0)


def test_a_session_is_put_away_before_another_is_used():
    # Seen: a loop that still ran committed into the trial that came after its own.
    elastic.use(LazySession(lambda: ElasticSession(trial="t")))
    for _ in range(2):  # asleep and awake
        with pytest.raises(RuntimeError, match=r"use\(None\)"):
            elastic.use(ElasticSession(trial="u"))
        assert elastic.current().trial == "t"
    elastic.use(None)
    elastic.use(LazySession(lambda: elastic.use(None) or ElasticSession(trial="t")))
    assert elastic.current().trial == "t" and elastic.current() is None


def test_what_torch_holds_of_a_trial_ends_with_its_session():
    # Seen: with `reuse_actors=True`, the memory of each trial's model stayed taken on the GPU.
    model = torch.nn.Linear(2, 1)
    session, gone = ElasticSession(trial="t"), weakref.ref(model.weight)
    session.prepare(model)
    session.close()
    del session, model
    gc.collect()
    assert gone() is None
