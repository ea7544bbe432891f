"""The arbiter: rounds, settings, apps and nodes that come and go."""

from __future__ import annotations

import math

import pytest

from tests.themis import cluster as cluster_module
from tests.themis.cluster import SETTINGS, Cluster, Job
from themis_bridge import ThemisError, auctioneer
from themis_bridge import messages as m
from themis_bridge.agent import Agent, Leave
from themis_bridge.arbiter import Arbiter
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.locality import Gpu
from themis_bridge.policy import Themis
from themis_bridge.settings import Settings


def test_second_app_gets_its_share_when_leases_end(monkeypatch):
    cluster = Cluster(4, policy=lambda f: Themis(f, recalls=False))
    first = cluster.join("a")
    cluster.wait(20)
    cluster.join("b")
    assert not cluster.holds("b")
    cluster.notices.clear()
    while not any(isinstance(n, Leave) for n in cluster.notices):
        cluster.wait(1)
        assert cluster.now < 160
    (leaving,) = [n for n in cluster.notices if isinstance(n, Leave)]
    assert 4 <= leaving.within <= 10, "told ahead"
    assert len(first.leases) == 4, "and still its own until the end"
    cluster.wait(leaving.within + 1)
    assert cluster.holds("b") == {leaving.gpu.id}
    cluster.wait(100)
    cluster.notices.clear()
    cluster.wait(300)
    assert len(cluster.holds("a")) == len(cluster.holds("b")) == 2
    assert not cluster.notices, "equals do not take turns"


class Fails(Themis):
    """A policy with a fault."""

    def decide(self, *args):
        return 1 / 0


def test_a_policy_that_fails_ends_only_its_round(caplog, monkeypatch):
    policies = [Themis]
    cluster = Cluster(2, policy=lambda f: policies[-1](f))
    cluster.join("a", Job(1))
    policies.append(Fails)
    monkeypatch.setattr(cluster_module, "check_arbiter", lambda arbiter: None)
    cluster.agents["a"].work.jobs = 2
    cluster.wait(200)
    assert cluster.arbiter.auctioneer.failed > 1 and "ZeroDivisionError" in caplog.text
    assert not cluster.reserved, "leases end as ever"


@pytest.mark.parametrize("owner", [auctioneer, ArbiterState])
def test_an_app_whose_report_cannot_be_used_keeps_no_other_from_its_gpus(owner, caplog, monkeypatch):
    # Seen: after one such app nothing was leased to anyone.
    name = "leases_to_recall" if owner is auctioneer else "take_report"
    real, cluster = getattr(owner, name), Cluster(2)
    monkeypatch.setattr(owner, name, lambda *args: 1 / 0 if "bad" in args else real(*args))
    monkeypatch.setattr(cluster_module, "check_arbiter", lambda arbiter: None)
    cluster.join("bad", Job(1))
    cluster.join("a", Job(2))
    cluster.wait(130)
    assert cluster.holds("a") and cluster.arbiter.auctioneer.failed and "report of bad" in caplog.text
    assert cluster.arbiter.auctioneer.due > cluster.arbiter.state.clock


def test_no_round_is_due_for_an_app_that_falls_silent_before_its_first_one():
    cluster = Cluster(0)
    cluster.join("silent")
    cluster.join("a", Job(1))
    cluster.silent.add("silent")
    cluster.wait(5)
    cluster.send(m.Gpus((Gpu("g0", "m0"), Gpu("g1", "m0"))))
    rounds = cluster.arbiter.state.rounds
    assert cluster.holds("a")
    cluster.send()
    assert cluster.arbiter.state.rounds == rounds


def silent(seconds: float) -> Cluster:
    """A cluster whose app "a", session "one", has been silent for so long."""
    cluster = Cluster(1, Settings(lease_s=100, notice_s=10, answer_s=2, patience_s=20))
    cluster.join("a", session="one", user="anna")
    cluster.wait(10)
    cluster.silent.add("a")
    cluster.wait(seconds)
    cluster.silent.clear()
    return cluster


def test_a_driver_whose_death_is_known_is_gone_and_another_one_gets_its_name():
    for seconds in (5, 30):
        cluster = silent(seconds)
        cluster.send(m.AppLeft("a", "another one"))
        assert cluster.arbiter.state.holder("a")
        cluster.send(m.AppLeft("a", "one"))
        assert not cluster.holds("a") and not cluster.arbiter.state.holder("a")
        cluster.join("a", session="two")
        assert cluster.holds("a") == {"g0"}


@pytest.mark.parametrize("life", ["", "ff"])
def test_what_comes_after_its_app_has_left_is_late_also_after_a_restart(life):
    # Seen: a job's last heartbeat came after it had left, and held GPUs for two seconds more.
    cluster = Cluster(1)
    agent = cluster.join("a")
    agent.life = "ff"
    late = agent.heartbeat()
    cluster.send(late, m.AppLeft("a", agent.session, life))
    state = cluster.arbiter.state
    cluster.arbiter = Arbiter.restored(state.saved(), {}, state.gpus.values())
    for _ in range(2):
        refused = cluster.arbiter.handle(late, cluster.now)
        assert refused.ends == (not life) and not cluster.arbiter.state.holder("a")
    # A driver that lives all the same makes another sign of life.
    agent.life = "aa"
    assert (cluster.arbiter.handle(agent.heartbeat(), cluster.now) is None) == bool(life)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_driver_that_was_silent_for_less_than_a_lease_keeps_its_name(restarts):
    cluster = silent(90)
    state = cluster.arbiter.state
    before = state.away["a"]
    assert not cluster.holds("a"), "its leases end after the patience"
    if restarts:
        cluster.arbiter = Arbiter.restored(state.saved(), {}, state.gpus.values())
        state = cluster.arbiter.state
    refused = cluster.arbiter.handle(Agent("a", "two", Job()).heartbeat(), cluster.now)
    assert not refused.ends and "keeps its name" in refused.why
    cluster.send()
    app = state.apps["a"]
    assert cluster.holds("a") == {"g0"} and not state.away
    assert (app.joined, app.useful, app.served, app.user) == (0.0, before.useful, before.served, "anna")
    assert state.contention("a") == pytest.approx(1.0)
    assert cluster.arbiter.handle(Agent("a", "two", Job()).heartbeat(), cluster.now).ends


def test_a_silent_app_does_not_count_and_its_user_keeps_its_doubt():
    cluster = silent(19)
    cluster.silent = {"a"}
    cluster.arbiter.state.apps["a"].doubt = 7.0
    cluster.join("b")
    assert cluster.arbiter.state.contention("b") == 2.0
    cluster.wait(2)
    assert cluster.arbiter.state.away.keys() == {"a"}
    cluster.wait(15)
    assert cluster.arbiter.state.contention("b") < 1.2 and cluster.holds("b") == {"g0"}
    cluster.join("c", user="anna")
    assert cluster.arbiter.state.apps["c"].former == 7.0
    cluster.send(m.AppLeft("a", "one"))
    assert not cluster.arbiter.state.away, "it has left after all"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"f": 2}, "f=2"),
        ({"lease_s": 0}, "lease_s=0"),
        ({"notice_s": 1e9}, "notice_s"),
        ({"quotas": {"a": -1}}, "'a'"),
        ({"weights": {"a": math.nan}}, "'a'"),
        *(({"reserves": {"a": reserve}}, "the reserve of job 'a' is") for reserve in (-1, 1.5, True, "2")),
        *(
            ({name: value}, f"{name}=.* or 0 to do without")
            for name in ("half_life_s", "most_demand")
            for value in (-1.0, math.inf, math.nan, "x")
        ),
        ({"lease": 3}, "'lease' is not a setting"),
    ],
)
def test_settings_that_are_not_allowed_are_refused(changes, why):
    cluster = Cluster(1)
    with pytest.raises(ThemisError, match=why):
        cluster.send(m.Configured(changes))
    assert cluster.arbiter.state.settings == SETTINGS


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps_ends_no_lease(jump):
    cluster = Cluster(2, Settings(lease_s=100, notice_s=10, answer_s=2, patience_s=30))
    agent = cluster.join("a")
    tokens = {view.token for view in agent.leases.values()}
    cluster.now += jump
    for _ in range(300):
        cluster.now += 1
        cluster.send()
    assert {view.token for view in agent.leases.values()} == tokens, "renewed as ever"
