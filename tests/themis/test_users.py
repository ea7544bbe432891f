"""Shares, quotas, weights and past usage go by user: who splits a job in many gets no more. And admission."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared_cluster.apps import Spec
from benchmarks.shared_cluster.simulate import Setup, Simulation
from benchmarks.shared_cluster.workloads import machines
from tests.themis.cluster import SETTINGS, Cluster, Job
from themis_bridge import JobInfo
from themis_bridge import messages as m
from themis_bridge.app_record import WORK_POWER, WORK_SLACK, AppRecord
from themis_bridge.arbiter_state import decayed
from themis_bridge.arbiter_view import view


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
    for quota in (5, 1):  # Two jobs under a quota of one hold one device together.
        cluster.send(m.Configured({"quotas": {"anna": quota}}))
        cluster.wait(200)
        assert len(cluster.holds("a0") | cluster.holds("a1")) == quota


def leaves(cluster: Cluster, name: str, did: float) -> AppRecord:
    """An app of "anna" joins, claims 100 s of work on four GPUs, does ``did`` s of it, and leaves."""
    cluster.join(name, Job(0), user="anna")
    record = cluster.arbiter.state.apps[name]
    record.whole, record.least, record.useful, record.served = 100.0, 1.0, 4, did
    cluster.leave(name)
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


# Past usage, and admission: both are off unless they are asked for

SPANS = st.lists(st.tuples(st.integers(0, 64), st.floats(0.1, 1e5)), min_size=1, max_size=8)


@given(SPANS, st.floats(10.0, 1e6), st.integers(1, 5))
def test_usage_does_not_depend_on_how_time_is_divided(spans: list[tuple[int, float]], half: float, parts: int) -> None:
    whole = cut = 0.0
    for gpus, seconds in spans:
        whole = decayed(whole, gpus, seconds, half)
        for _ in range(parts):
            cut = decayed(cut, gpus, seconds / parts, half)
    assert cut == pytest.approx(whole, rel=1e-6, abs=1e-6)
    # Never more than what was used, and half of it after a half-life.
    assert whole <= sum(gpus * seconds for gpus, seconds in spans) * (1 + 1e-6) + 1e-6
    assert decayed(whole, 0, half, half) == pytest.approx(whole / 2)


def shares(half_life_s: float) -> dict[str, int]:
    """GPUs of both users some leases after "bert" has come, to whom "anna" is as far behind, with days of usage."""
    cluster = Cluster(8, replace(SETTINGS, f=1.0, half_life_s=half_life_s))
    cluster.join("old", Job(8, 1e9), user="anna")
    cluster.wait(3000, 100.0)
    cluster.leave("old")
    for name, user in (("a", "anna"), ("b", "bert")):
        cluster.join(name, Job(8, 1e5), user=user)
    cluster.wait(600, 5.0)
    return {name: len(cluster.holds(name)) for name in ("a", "b")}


def test_a_user_who_had_the_cluster_for_days_comes_later_if_that_is_wanted() -> None:
    with_it, without = shares(1e5), shares(0.0)
    assert abs(without["a"] - without["b"]) <= 2
    assert with_it["b"] > with_it["a"] + 2


def test_usage_is_in_the_status_and_fades() -> None:
    cluster = Cluster(2, replace(SETTINGS, half_life_s=1000.0))
    cluster.join("a", Job(2, 1e6), user="anna")
    cluster.wait(100)
    state = cluster.arbiter.state
    used = view(state)["a"]["usage"]
    assert 150 < used <= 200
    cluster.leave("a")
    cluster.wait(10 * 1000.0, 100.0)
    assert state.usage == {}
    cluster.join("a", Job(2, 1e6), user="anna")
    cluster.wait(100)
    cluster.send(m.Configured({"half_life_s": 0.0}))
    cluster.wait(1)
    assert state.usage == {} and cluster.arbiter.state.weights() == {}


def test_an_app_is_refused_while_others_want_too_many_gpus_and_is_told_why() -> None:
    cluster = Cluster(4, replace(SETTINGS, most_demand=1.0))
    cluster.join("a", Job(8, 1e5))
    cluster.wait(5)
    # An app counts for no more than all GPUs, and the limit is all GPUs.
    assert cluster.join("b", Job(1, 1e5)).refused is None
    cluster.wait(5)
    late = cluster.join("late", Job(1, 1e5))
    assert late.refused == (
        "app 'late' is not admitted: the apps that are here could use 5 GPUs, which is more than 1 times the 4 GPUs of "
        "the cluster (the arbiter's setting most_demand); start it later"
    )
    assert "late" not in cluster.arbiter.state.apps
    # Whoever is there stays, also with a new session; and there is room again when somebody has left.
    assert cluster.join("b", Job(1, 1e5), cluster.agents["b"].session).refused is None
    cluster.leave("b")
    assert cluster.join("late", Job(1, 1e5)).refused is None
