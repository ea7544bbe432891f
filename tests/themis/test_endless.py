"""Apps that never end (services), and reserves: what a service gets beside searches, and that lies gain nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.themis.cluster import SETTINGS, Cluster, Job, Service
from themis_bridge import messages as m
from themis_bridge.app_record import AppRecord
from themis_bridge.auction import Bid
from themis_bridge.fairness import UNSERVED, endless_rho


def test_rho_is_what_its_share_could_do_over_what_it_does():
    assert endless_rho(6, 4.0, 2) == 2.0
    assert endless_rho(6, 4.0, 4) == 1.0
    assert endless_rho(6, 4.0, 8) == pytest.approx(4 / 6), "more GPUs than it wants change nothing"
    assert endless_rho(2, 4.0, 2) == 1.0
    assert endless_rho(6, 4.0, 0) == UNSERVED


@settings(deadline=None)
@given(
    st.integers(1, 64), st.floats(0.1, 64), st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 64), st.integers(0, 64)
)
def test_whatever_it_says_it_is_never_behind_with_its_share(wanted, share, rho, best, held, more):
    app = AppRecord("s", 0.0, 0.0)
    report = m.Report(rho, wanted, best=best, endless=True)
    app.take_report(report, list(range(held)), 64, 100.0, 64 / share)
    row = frozenset(f"g{number}" for number in range(more))
    bid = app.own_bid(Bid("a", {frozenset(): rho, row: rho / 2}), report, held, 64, 100.0, 64 / share)
    for value, gpus in ((app.rho, held), (bid.rho[row], held + len(row))):
        assert value == pytest.approx(endless_rho(wanted, share, gpus))
        assert gpus < min(share, wanted) or value <= 1 + 1e-9
    assert app.distrust == 1.0 and app.leave()[0] == 1.0


@pytest.mark.parametrize("report", [m.Report(1.0, 0, endless=True), m.Report(1.0, 2, 2, endless=True)])
def test_an_endless_app_of_no_gpu_or_of_gangs_is_refused(report):
    cluster = Cluster(1)
    cluster.silent.add("a")
    cluster.join("a")
    cluster.said.clear()
    cluster.send(m.RhoAnswer("a", "s", cluster.arbiter.state.rounds, report))
    assert "endless=True" in cluster.said[0].why


def test_a_service_gets_what_its_load_wants_and_searches_get_the_rest():
    cluster = Cluster(8)
    service = Service(2)
    cluster.join("service", service)
    cluster.join("search", Job(8))
    cluster.wait(600)
    assert len(cluster.holds("service")) == 2 and len(cluster.holds("search")) == 6
    service.wanted = 5
    cluster.wait(600)
    # The search had more than its share until now, so the service may have more for a while.
    assert 4 <= len(cluster.holds("service")) <= 5
    service.wanted = 1
    cluster.wait(600)
    assert len(cluster.holds("service")) == 1 and len(cluster.holds("search")) == 7


@pytest.mark.parametrize("searches", [1, 2, 4])
def test_a_service_that_comes_late_has_its_reserve_after_one_notice(searches):
    cluster = Cluster(4, replace(SETTINGS, reserves={"service": 3}))
    for number in range(searches):
        cluster.join(f"search{number}", Job(8))
    cluster.wait(20)
    assert len(cluster.reserved) == 4
    cluster.join("service", Service(3))
    cluster.wait(SETTINGS.notice_s + 2 * SETTINGS.answer_s)
    assert len(cluster.holds("service")) == 3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 4), st.integers(1, 6), st.integers(1, 4))
def test_no_auction_takes_a_reserve(reserve, wanted, searches):
    cluster = Cluster(4, replace(SETTINGS, reserves={"service": reserve}))
    cluster.join("service", Service(wanted))
    for number in range(searches):
        cluster.join(f"search{number}", Job(4, 1e5))
    least = []
    for _ in range(40):
        cluster.wait(10, step=5)
        least.append(len(cluster.holds("service")))
    # Leases of one GPU go from hand to hand within a notice; from then on the reserve stands.
    assert min(least[20:]) >= reserve
    assert max(least[20:]) <= max(reserve, wanted)


def test_reserves_beyond_all_gpus_go_to_the_app_that_came_first_and_a_quota_is_kept():
    cluster = Cluster(4, replace(SETTINGS, reserves={"first": 3, "second": 3, "third": 2}, quotas={"first": 2}))
    cluster.join("first", Service(4))
    cluster.wait(1)
    cluster.join("second", Service(4))
    cluster.wait(400)
    assert [len(cluster.holds(name)) for name in ("first", "second")] == [2, 2]
