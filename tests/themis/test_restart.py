"""An arbiter that dies, and its successor."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.themis.cluster import SETTINGS, Cluster, Job, Service
from themis_bridge.agent import Agent
from themis_bridge.arbiter import Arbiter
from themis_bridge.arbiter_state import ArbiterState


def test_without_books_apps_keep_what_they_have_for_a_whole_lease():
    cluster = Cluster(2)
    cluster.join("a", Job(2))
    held = dict(cluster.reserved)
    there = {("a", gpu, token): "group" for gpu, (_, token) in held.items()}
    cluster.arbiter = Arbiter.restored({}, there, cluster.arbiter.state.gpus.values())
    cluster.notices.clear()
    cluster.wait(30)
    assert len(held) == 2 and cluster.reserved == held and not cluster.notices


def test_who_has_the_name_of_an_app_of_the_books_is_not_ended_before_that_one_is_heard():
    # Seen: an arbiter that died before its books knew the next app of a name; the next arbiter ended that app.
    cluster = Cluster(1)
    agent, other = cluster.join("a"), Agent("a", "other", Job())
    state = cluster.arbiter.state
    cluster.arbiter = Arbiter.restored(state.saved(), {}, state.gpus.values())
    assert not cluster.arbiter.handle(other.heartbeat(), cluster.now).ends
    cluster.arbiter.handle(agent.heartbeat(), cluster.now)
    assert cluster.arbiter.handle(other.heartbeat(), cluster.now).ends


@pytest.mark.parametrize("told", [True, False])
def test_a_lease_whose_group_is_gone_is_over_and_one_that_was_not_carried_out_goes_on(told):
    cluster = Cluster(1)
    cluster.join("a")
    token, state = cluster.reserved.pop("g0")[1], cluster.arbiter.state
    if not told:
        state.leases.get("g0").group = ""
    # That of another app was being removed.
    cluster.arbiter = Arbiter.restored(state.saved(), {("b", "g0", 77): "group"}, state.gpus.values())
    cluster.wait(5)
    assert cluster.reserved == {"g0": ("a", 78 if told else token)} and not cluster.holds("b")


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
    assert again.apps["gang"].together == 4 and again.usage["anna"] > 0 and "bert" in again.doubts
    assert again.apps["service"].endless and again.reserve("service") == 1
