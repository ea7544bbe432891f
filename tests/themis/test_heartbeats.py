"""What a heartbeat costs, what it is answered, and that a late one says nothing."""

from __future__ import annotations

import pickle
from dataclasses import replace

from tests.themis.cluster import Cluster, Job, claim
from themis_bridge import messages as m
from themis_bridge.arbiter import Arbiter
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.lease_manager import leases_of


def test_what_an_app_says_and_is_told_changes_only_with_its_leases() -> None:
    cluster = Cluster(64)
    agent = cluster.join("a", Job(64, 1e5))
    cluster.wait(10)
    assert len(agent.leases) == 64
    heard = agent.heartbeat()
    assert len(pickle.dumps(heard)) < 500
    # Renewals are no change, and what another arbiter says of the same leases is none either.
    cluster.wait(120)
    state = cluster.arbiter.state
    assert leases_of(state, "a").digest == heard.known
    again = ArbiterState.loaded(state.saved(), state.gpus.values())
    assert leases_of(again, "a").digest == heard.known
    state.leases.get("g0").ending = True
    assert leases_of(state, "a").digest != heard.known


def test_a_late_message_is_only_an_older_report() -> None:
    cluster = Cluster(2)
    agent = cluster.join("a", Job(2, 1e5))
    agent.vacated("g0", agent.leases["g0"].token)
    late = agent.heartbeat()
    cluster.send()
    cluster.agents["a"].work.jobs = 1
    cluster.wait(1)
    held, report = cluster.holds("a"), cluster.arbiter.state.reports["a"]
    # It comes again, and says of a GPU that was leased to the app once more that it has left it.
    cluster.send(late, replace(late, left=tuple((gpu, view.token) for gpu, view in agent.leases.items())))
    assert cluster.holds("a") == held and cluster.arbiter.state.reports["a"] == report != late.report


class Runs:
    """The `Work` of a job of two GPUs that runs on them for 200 s."""

    left = 400.0

    def report(self) -> m.Report:
        return claim(self.left, 400.0 - self.left)


def test_an_app_that_stands_still_is_not_doubted_for_what_its_leases_do_meanwhile() -> None:
    cluster, work = Cluster(2), Runs()
    cluster.join("a", work)
    for second in range(160):
        cluster.silent = {"a"} if 60 < second < 130 else set()
        work.left -= float(len(cluster.holds("a")))
        cluster.wait(1)
        if second == 125:
            assert len(cluster.holds("a")) < 2, "an old report wins nothing: nobody could check what it says"
    assert len(cluster.holds("a")) == 2 and cluster.arbiter.state.apps["a"].distrust == 1.0


def test_gpus_wait_for_the_first_report_of_each_app_but_not_for_long() -> None:
    cluster = Cluster(4)
    cluster.join("a", Job(4, 1e5))
    cluster.join("b", Job(4, 1e5))
    cluster.wait(30)
    state = cluster.arbiter.state
    held = {name: cluster.holds(name) for name in "ab"}
    cluster.arbiter = Arbiter.restored(state.saved(), {}, state.gpus.values())
    for lease in list(cluster.arbiter.state.leases):
        cluster.arbiter.state.leases.drop(lease)
    cluster.reserved.clear()
    cluster.silent = {"b"}
    cluster.wait(state.settings.answer_s - 1)
    assert not cluster.reserved and held["b"], "an arbiter that has just begun knows of no report"
    cluster.wait(2)
    assert len(cluster.holds("a")) == 4
