"""Apps that never end (services), and reserves: what a service gets beside searches, and that lies gain nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.themis.cluster import SETTINGS, Cluster, Job, Service
from themis_bridge import messages as m
from themis_bridge.app_record import AppRecord
from themis_bridge.fairness import endless_rho
from themis_bridge.locality import Gpu


@settings(deadline=None)
@given(st.integers(1, 64), st.floats(0.1, 64), st.integers(0, 64), st.integers(0, 64))
def test_whatever_it_says_it_is_never_behind_with_its_share(wanted, share, held, more):
    app, report = AppRecord("s", 0.0, 0.0), m.Report(endless=wanted)
    gpus = [Gpu(f"g{number}", "m") for number in range(held + more)]
    app.take_report(report, dict(enumerate(gpus[:held])), 64, 100.0, 64 / share)
    row = app.worth(report, held, 64, 100.0, 64 / share).rho(gpus)
    for value, number in ((app.rho, held), (row, held + more)):
        assert value == pytest.approx(endless_rho(wanted, share, number))
        assert number < min(share, wanted) or value <= 1 + 1e-9
    assert app.distrust == 1.0 and app.leave()[0] == 1.0


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
