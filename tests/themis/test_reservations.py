"""Reservations that Ray cannot make: pauses, other apps, and what counts as held meanwhile."""

from __future__ import annotations

import pytest

from tests.themis.cluster import Cluster, Job
from themis_bridge import messages as m
from themis_bridge.agent import Gained
from themis_bridge.locality import Gpu
from themis_bridge.settings import Settings


def test_a_gpu_that_cannot_be_reserved_for_one_app_goes_to_another():
    cluster = Cluster(3)
    cluster.join("b", Job(1))
    cluster.impossible = {(gpu, "a") for gpu in {"g0", "g1", "g2"} - cluster.holds("b") - {"g2"}}
    cluster.join("a", Job(3))
    cluster.wait(6)
    assert cluster.holds("a") == {"g2"}, "it tried both"
    cluster.agents["b"].work.jobs = 3
    cluster.wait(6)
    assert cluster.holds("b") == {"g0", "g1"}


def test_a_gpu_that_something_outside_keeps_is_tried_ever_less_often():
    cluster = Cluster(1)
    cluster.impossible = {("g0", "a")}
    agent = cluster.join("a")
    cluster.wait(600)
    tries = sum(isinstance(said, m.Reserve) for said in cluster.said)
    assert 6 < tries < 12
    cluster.impossible.clear()
    cluster.send(m.Freed())
    cluster.wait(1)
    assert set(agent.leases) == {"g0"}
    assert sum(isinstance(notice, Gained) for notice in cluster.notices) == 2, "the first try, and the one that counts"


def test_a_repeated_reservation_does_not_count_as_held_before_it_is_made():
    cluster = Cluster(1)
    cluster.join("b", Job(1))
    cluster.impossible = {("g1", "a"), ("g1", "b")}
    cluster.send(m.GpuJoined(Gpu("g1", "m1")))
    agent = cluster.join("a", Job(1))
    cluster.wait(3)
    # The reservation is tried again, and Ray has not made it yet.
    token = cluster.arbiter.state.leases.grant("g1", "a", 1e6).token
    cluster.wait(150)
    assert cluster.holds("a") == set(agent.leases) == {"g0"}, "it bids for another"
    cluster.send(m.Reserved("g1", token))
    assert set(agent.leases) == {"g0", "g1"}


def test_a_reservation_over_the_quota_is_closed():
    cluster = Cluster(1, Settings(quotas={"a": 1}, lease_s=100, notice_s=10, answer_s=2, patience_s=1e6))
    cluster.impossible = {("g0", "a")}
    cluster.join("a")
    cluster.send(m.GpuJoined(Gpu("g1", "m1")))
    cluster.wait(1)
    assert cluster.holds("a") == {"g1"}
    lease = cluster.arbiter.state.leases.grant("g0", "a", 1e6)
    assert m.Remove("g0", "a", lease.token) in cluster.arbiter.handle(m.Reserved("g0", lease.token), cluster.now)


@pytest.mark.parametrize("others", [frozenset(), frozenset({"b"})])
def test_a_failure_for_an_app_that_has_left_meanwhile_is_not_remembered_for_it(others):
    cluster = Cluster(1)
    cluster.join("a")
    cluster.join("b")
    arbiter = cluster.arbiter
    app, token = cluster.reserved.pop("g0")
    assert app == "a"
    arbiter.handle(m.AppLeft("a", "s"), cluster.now)
    arbiter.handle(m.ReserveFailed("g0", token, others), cluster.now)
    assert ("g0", "a") not in arbiter.state.backoff
    assert arbiter.state.backoff.barred_apps("g0", arbiter.state.clock) == others


def test_what_one_app_cannot_have_is_not_tried_for_those_that_ask_for_as_much():
    cluster = Cluster(1)
    for name in "abc":
        cluster.join(name)
    _, token = cluster.reserved.pop("g0")
    cluster.said.clear()
    cluster.send(m.ReserveFailed("g0", token, frozenset("abc")))
    cluster.wait(2)
    assert not any(isinstance(said, m.Reserve) for said in cluster.said)
    # "d" asks for less.
    cluster.join("d")
    assert cluster.holds("d") == {"g0"}
    assert not cluster.arbiter.state.backoff.barred_apps("g0", cluster.now), "its success ends the others' pauses"
