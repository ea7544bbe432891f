"""An arbiter that dies, and its successor."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.themis.cluster import SETTINGS, Cluster, Job, Service
from themis_bridge import messages as m
from themis_bridge.arbiter import Arbiter
from themis_bridge.arbiter_state import ArbiterState


@pytest.mark.parametrize("books", [True, False])
def test_nothing_changes_for_apps_when_the_arbiter_dies(books):
    cluster = Cluster(4)
    first, second = cluster.join("a", Job(2)), cluster.join("b", Job(2))
    cluster.wait(5)
    held = {name: cluster.holds(name) for name in "ab"}
    assert all(held.values())
    data = cluster.arbiter.state.saved() if books else {}
    gpus = cluster.arbiter.state.gpus.values()
    there = {gpu: (*held, "group") for gpu, held in cluster.reserved.items()}
    cluster.arbiter = Arbiter.restored(data, there, gpus)
    cluster.notices.clear()
    cluster.wait(30)
    assert {name: cluster.holds(name) for name in "ab"} == held
    reserved = {gpu: token for gpu, (_, token) in cluster.reserved.items() if gpu in held["a"]}
    assert {gpu: view.token for gpu, view in first.leases.items()} == reserved
    assert second.leases
    assert not cluster.notices


def test_a_grant_that_was_stored_but_not_carried_out_is_made_anew_with_a_new_token():
    cluster = Cluster(1)
    cluster.join("a")
    token = cluster.reserved.pop("g0")[1]
    cluster.arbiter = Arbiter.restored(cluster.arbiter.state.saved(), {}, cluster.arbiter.state.gpus.values())
    cluster.wait(5)
    assert cluster.reserved == {"g0": ("a", token + 1)}


def test_a_reservation_that_is_not_in_the_books_is_removed():
    cluster = Cluster(2)
    cluster.join("a", Job(1))
    state = cluster.arbiter.state
    free = next(iter(set(state.gpus) - set(cluster.reserved)))
    reserved = {**{gpu: (*held, "group") for gpu, held in cluster.reserved.items()}, free: ("b", 77, "group")}
    arbiter = Arbiter.restored(state.saved(), reserved, state.gpus.values())
    lease = arbiter.state.leases.get(free)
    assert lease.key == ("b", free, 77) and lease.closing and arbiter.state.leases.token == 77
    arbiter.handle(m.Removed(free, 77), 0.0)
    assert arbiter.state.leases.get(free) is None


def test_all_that_is_in_the_books_comes_back():
    cluster = Cluster(8, replace(SETTINGS, half_life_s=1000.0, reserves={"service": 1}))
    cluster.join("gang", Job(1, 1e5, together=4), user="anna")
    cluster.join("service", Service(1))
    cluster.wait(50)
    state = cluster.arbiter.state
    state.doubts["bert"] = (2.0, 100.0)
    data = json.loads(json.dumps(state.saved()))
    again = ArbiterState.loaded(data, state.gpus.values())
    assert json.loads(json.dumps(again.saved())) == data
    assert again.gangs() == {"gang": 4} and again.usage["anna"] > 0 and "bert" in again.doubts
    assert again.apps["service"].endless and again.reserve("service") == 1
