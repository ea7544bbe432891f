"""Reservations that Ray cannot make: pauses, other apps, and what counts as held meanwhile."""

from __future__ import annotations

from tests.themis.cluster import Cluster, Job
from themis_bridge import messages as m
from themis_bridge.agent import Gained
from themis_bridge.lease_manager import leases_of
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
    assert 6 < cluster.arbiter.state.leases.token < 12, "so many tries"
    cluster.impossible.clear()
    cluster.send(m.Freed())
    cluster.wait(1)
    assert set(agent.leases) == {"g0"}
    assert sum(isinstance(notice, Gained) for notice in cluster.notices) == 1, "the try that counts"


def test_a_repeated_reservation_does_not_count_as_held_before_it_is_made():
    cluster = Cluster(2)
    cluster.impossible = {("g1", "a")}
    agent = cluster.join("a", Job(2))
    cluster.wait(3)
    assert set(agent.leases) == {"g0"}
    # The reservation is tried again, and Ray has not made it yet.
    state = cluster.arbiter.state
    lease = state.leases.get("g1") or state.leases.grant("g1", "a", 1e6)
    assert not state.is_kept(lease, {}) and state.is_kept(state.leases.get("g0"), {})
    assert [view.gpu.id for view in leases_of(state, "a").leases] == ["g0"]
    cluster.impossible.clear()
    cluster.send()
    assert set(agent.leases) == {"g0", "g1"} and state.is_kept(lease, {})


def test_a_reservation_over_the_quota_is_closed():
    cluster = Cluster(1, Settings(quotas={"a": 1}, lease_s=100, notice_s=10, answer_s=2, patience_s=1e6))
    cluster.impossible = {("g0", "a")}
    cluster.join("a")
    cluster.send(m.Gpus((Gpu("g0", "m0"), Gpu("g1", "m1"))))
    cluster.wait(1)
    assert cluster.holds("a") == {"g1"}
    lease = cluster.arbiter.state.leases.grant("g0", "a", 1e6)
    cluster.arbiter.handle(m.Reserved("g0", lease.token, "group"), cluster.now)
    assert lease.closing


def test_a_failure_for_an_app_that_has_left_meanwhile_is_not_remembered_for_it():
    cluster = Cluster(1)
    cluster.join("a")
    cluster.join("b")
    arbiter = cluster.arbiter
    app, token = cluster.reserved.pop("g0")
    assert app == "a"
    arbiter.handle(m.AppLeft("a", "s"), cluster.now)
    arbiter.handle(m.ReserveFailed("g0", token, {"GPU": 1.0}), cluster.now)
    assert ("g0", "a") not in arbiter.state.backoff
    assert ("g0", "b") in arbiter.state.backoff, "it asks for as much as the one that has left"


def test_what_one_app_cannot_have_is_not_tried_for_those_that_ask_for_as_much():
    cluster = Cluster(1)
    for name, memory in (("a", 2.0), ("b", 2.0), ("c", 3.0)):
        cluster.join(name, memory=memory)
    _, token = cluster.reserved.pop("g0")
    cluster.send(m.ReserveFailed("g0", token, {"GPU": 1.0, "memory": 2.0}))
    cluster.wait(2)
    assert cluster.arbiter.state.leases.token == token
    # "d" asks for less.
    cluster.join("d")
    assert cluster.holds("d") == {"g0"}
    assert not cluster.arbiter.state.backoff.barred_apps("g0", cluster.now), "its success ends the others' pauses"
