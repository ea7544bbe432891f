"""Shares, quotas and weights go by user: who splits a job in many gets no more than who does not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from benchmarks.shared_cluster.apps import Spec
from benchmarks.shared_cluster.simulate import Setup, Simulation
from benchmarks.shared_cluster.workloads import machines
from tests.themis.cluster import SETTINGS, Cluster, Job
from themis_bridge import JobInfo
from themis_bridge import messages as m
from themis_bridge.app_record import WORK_POWER, WORK_SLACK, AppRecord


class Watched(Simulation):
    """Notes how many GPU seconds each user has had when the first app ends."""

    had: dict[str, float] | None = None

    def _app_event(self, name: str) -> bool:
        ended = super()._app_event(name)
        if ended and self.had is None:
            self.had = defaultdict(float)
            for app in self.apps.values():
                self.had[app.spec.user] += app.attained
        return ended


def test_ten_jobs_of_one_user_and_one_of_another_have_half_of_the_cluster_each() -> None:
    many = [Spec(f"a{i}", 0.0, [[JobInfo(2000, 1.0)] * 8], user="anna") for i in range(10)]
    one = Spec("b", 0.0, [[JobInfo(5000, 1.0, 8)] * 32], user="bert")
    run = Watched([*many, one], machines(((5, 4, 1),)), Setup())
    result = run.run()
    assert run.had is not None
    assert run.had["bert"] / sum(run.had.values()) == pytest.approx(0.5, rel=0.1)
    # By the measure of the benchmark, too, the share of "bert" is half of the cluster.
    assert result.rho["b"] == pytest.approx(1.0, rel=0.1)


def test_the_apps_of_a_user_share_a_quota() -> None:
    cluster = Cluster(8, replace(SETTINGS, quotas={"anna": 3}))
    for name in ("a0", "a1"):
        cluster.join(name, Job(8, 1e5), user="anna")
    for _ in range(30):
        cluster.wait(10)
        assert len(cluster.holds("a0") | cluster.holds("a1")) == 3
    for quota in (5, 1):
        cluster.send(m.Configured({"quotas": {"anna": quota}}))
        cluster.wait(200)
        assert len(cluster.holds("a0") | cluster.holds("a1")) == quota


def leaves(cluster: Cluster, name: str, did: float) -> AppRecord:
    """An app of "anna" joins, claims 100 s of work on four GPUs, does ``did`` s of it, and leaves."""
    cluster.join(name, Job(0), user="anna")
    record = cluster.arbiter.state.apps[name]
    record.whole, record.least, record.useful, record.served = 100.0, 1.0, 4, did
    cluster.send(m.AppLeft(name, "s"))
    return record


def test_a_user_who_leaves_and_comes_back_keeps_the_doubt_until_he_has_worked_it_off() -> None:
    cluster = Cluster(0)
    state = cluster.arbiter.state
    # It has done twice the work that it claimed, and ended before it reported that.
    assert leaves(cluster, "liar", 200.0).former == 1.0
    doubt = pytest.approx((2 / WORK_SLACK) ** WORK_POWER)
    assert state.doubts == {"anna": (doubt, 800.0)}
    for number in range(2):
        assert leaves(cluster, f"stopped{number}", 0.0).distrust == doubt
        assert leaves(cluster, f"honest{number}", 100.0).distrust == doubt
    assert state.doubts == {}
    assert leaves(cluster, "new", 100.0).distrust == 1.0
