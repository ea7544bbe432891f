"""What a heartbeat costs the arbiter: it depends on what its app holds, and on nothing else."""

from __future__ import annotations

import pickle

import pytest

from tests.themis.cluster import Cluster, Job
from themis_bridge import messages as m
from themis_bridge.arbiter import Arbiter
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.leases import LeaseTable


def test_a_heartbeat_looks_at_no_gpu_of_other_apps(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(8)
    for name in ("a", "b"):
        cluster.join(name, Job(8, 1e5))
    cluster.wait(10)

    def fail(*_: object) -> None:
        raise AssertionError("a heartbeat looked at all GPUs, all leases or all apps")

    with monkeypatch.context() as patch:
        for owner, name in ((LeaseTable, "__iter__"), (ArbiterState, "offerable"), (ArbiterState, "account")):
            patch.setattr(owner, name, fail)
        cluster.now += 1.0
        (told,) = cluster.arbiter.handle(m.Heard("a", "s"), cluster.now)
    assert isinstance(told, m.Leases)
    assert {view.gpu.id for view in told.leases} == cluster.holds("a") != set()


def holding(gpus: int) -> Cluster:
    cluster = Cluster(gpus)
    cluster.join("a", Job(gpus, 1e5))
    cluster.wait(10)
    assert len(cluster.agents["a"].leases) == gpus
    return cluster


def heartbeat(cluster: Cluster) -> list[m.Instruction]:
    """The answer to the agent's heartbeat, which the agent does not get."""
    return cluster.arbiter.handle(cluster.agents["a"].heartbeat(), cluster.now)


@pytest.mark.parametrize("gpus", [4, 512])
def test_an_app_whose_leases_have_not_changed_is_told_nothing(gpus: int) -> None:
    cluster = holding(gpus)
    sent = len(pickle.dumps(cluster.agents["a"].heartbeat()))
    for _ in range(50):
        cluster.now += 0.2
        assert heartbeat(cluster) == []
    assert sent < 200, "what it sends does not grow either"


def test_a_change_whose_message_is_lost_is_told_again() -> None:
    cluster = holding(4)
    agent = cluster.agents["a"]
    cluster.silent.add("a")
    cluster.arbiter.state.leases.get("g0").expires = cluster.now
    cluster.wait(1)
    for _ in range(2):  # the first answer is lost, too
        (told,) = heartbeat(cluster)
        assert "g0" in agent.leases
    agent.handle(told)
    assert set(agent.leases) == {"g1", "g2", "g3"}
    assert heartbeat(cluster) == []


@pytest.mark.parametrize("books", ["there", "lost", "lost, and the clock of the machine stands still"])
def test_a_restarted_arbiter_tells_every_app_its_leases(books: str) -> None:
    cluster = holding(4)
    state, agent = cluster.arbiter.state, cluster.agents["a"]
    data = state.saved() if books == "there" else {}
    if books.endswith("still"):
        state.epoch = 10**9
        cluster.arbiter._leases.tell_app("a")
        cluster.send(m.Tick())
    wall = state.epoch / 1000 if books.endswith("still") else 1e9
    cluster.arbiter, _ = Arbiter.restored(data, cluster.reserved, state.gpus.values(), wall)
    (told,) = heartbeat(cluster)
    assert told.version > agent.heartbeat().version
    agent.handle(told)
    assert len(agent.leases) == 4 and heartbeat(cluster) == []


def test_no_word_of_an_app_changes_the_versions_of_another() -> None:
    cluster = Cluster(4)
    for name in ("a", "b"):
        cluster.join(name, Job(4, 1e5))
    cluster.wait(10)
    before, known = cluster.arbiter.state.epoch, (10**18, 7)
    (told,) = cluster.arbiter.handle(m.Heard("b", "s", version=known), cluster.now)
    assert told.version > known, "it may know that of an arbiter that lost its books"
    cluster.wait(200)
    assert cluster.arbiter.state.epoch == before
    assert cluster.agents["a"].heartbeat().version[0] == before
    assert cluster.agents["b"].heartbeat().version > known


def test_the_leases_of_an_app_are_those_of_the_table() -> None:
    table = LeaseTable()
    for gpu, app in (("g0", "a"), ("g1", "b"), ("g2", "a"), ("g3", "a")):
        table.grant(gpu, app, 10.0)
    table.drop(table.of("a")[0])
    table.of("a")[1].closing = True
    for known in (table, LeaseTable.loaded(table.saved())):
        assert {app: [lease.gpu for lease in known.of(app)] for app in "abc"} == {"a": ["g2"], "b": ["g1"], "c": []}
