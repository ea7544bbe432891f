"""Reservations for which Ray has no room: they wait in its queue, and bar only those who ask for as much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.themis.cluster import SETTINGS, Cluster, Job, state_of
from themis_bridge import messages as m
from themis_bridge.agent import Agent, Gained
from themis_bridge.arbiter import Arbiter
from themis_bridge.locality import Gpu


def waiting(memory: float, **more) -> Cluster:
    """A cluster of one GPU that "a" has won, which asks for so much memory; something else uses the memory."""
    cluster = Cluster(1, **more)
    cluster.impossible = {("g0", "a")}
    cluster.join("a", Job(2), memory=memory)
    cluster.wait(1)
    assert [state_of(lease) for lease in cluster.arbiter.state.leases] == ["waiting"]
    return cluster


@pytest.mark.parametrize("dies", [False, True])
def test_who_waits_has_its_gpu_as_soon_as_there_is_room_and_a_whole_lease(dies):
    cluster = waiting(2.0)
    cluster.wait(600)
    state = cluster.arbiter.state
    assert state.leases.token == 1, "asked once, however long it takes"
    assert not state.leases.of("a") and not cluster.agents["a"].leases
    cluster.impossible.clear()
    if dies:
        cluster.reserved = {"g0": ("a", 1)}
        cluster.arbiter = Arbiter.restored(state.saved(), {("a", "g0", 1): "group"}, state.gpus.values())
        state = cluster.arbiter.state
    cluster.wait(1)
    assert cluster.holds("a") == {"g0"} and sum(isinstance(each, Gained) for each in cluster.notices) == 1
    assert state.leases.get("g0").expires > cluster.now + SETTINGS.lease_s / 2 - 2


@pytest.mark.parametrize(
    ("asks", "memory", "gets"), [(2.0, 1.0, {"g0"}), (2.0, 2.0, set()), (2.0, 3.0, set()), (0.0, None, set())]
)
def test_what_one_app_cannot_have_goes_to_one_that_asks_for_less(asks, memory, gets):
    cluster = waiting(asks)
    cluster.join("b", memory=memory)
    cluster.wait(1)
    assert cluster.holds("b") == gets


def test_a_reservation_of_which_there_is_no_more_use_is_withdrawn():
    cluster = waiting(0.0, settings=replace(SETTINGS, quotas={"a": 1}))
    state = cluster.arbiter.state
    cluster.send(m.Gpus((*state.gpus.values(), Gpu("g1", "m1"))))
    cluster.wait(1)
    # What waits counts for no quota, until there is no room in that for it.
    assert cluster.holds("a") == {"g1"} and [lease.gpu for lease in state.leases] == ["g1"]


def test_a_lease_that_is_promised_before_it_is_known_to_wait_goes_to_its_heir():
    # Seen: the promise lasted for as long as something outside had the GPU, and counted as a GPU of its heir.
    cluster = Cluster(2)
    for name in ("a", "b"):
        cluster.agents[name] = Agent(name, name, Job(2), bundle={"GPU": 1.0})
        cluster.arbiter.handle(cluster.agents[name].heartbeat(), 0.0)
        cluster.arbiter.handle(m.Tick(), 0.0)
    (promised,) = (lease for lease in cluster.arbiter.state.leases if lease.heir == "b")
    cluster.impossible = {(promised.gpu, "a"), (promised.gpu, "b")}
    cluster.send()
    (waits,) = (lease for lease in cluster.arbiter.state.leases if lease.waits)
    assert (waits.gpu, waits.app) == (promised.gpu, "b") and waits.token > promised.token
