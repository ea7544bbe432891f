"""The order among apps that are equally far behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tests.themis.cluster import SETTINGS, Cluster, Job
from themis_bridge.app_record import AppRecord
from themis_bridge.arbiter_view import view
from themis_bridge.leases import LeaseTable
from themis_bridge.locality import Gpu
from themis_bridge.messages import Report
from themis_bridge.policy import Situation, share_leftover, worst_first
from themis_bridge.preemption import leases_to_recall
from themis_bridge.standing import turn

NAMES = ("a", "b", "c", "zz")


def equals(number: int, joined: dict[str, float] | None = None) -> Situation:
    reports = dict.fromkeys(NAMES, Report(2.0, 1, best=1.0, left=9.0))
    return Situation(reports, dict.fromkeys(NAMES, ()), {"g": Gpu("g", "m")}, {}, {}, joined or {}, number)


def test_no_name_wins_ties() -> None:
    first = Counter(worst_first(equals(number))[0] for number in range(400))
    given = Counter(share_leftover(equals(number), {}, {})["g"] for number in range(400))
    # Each would be 100 if lots were drawn, and 400 for one of them if a name decided.
    assert all(60 < first[name] < 140 and 60 < given[name] < 140 for name in NAMES)


def test_among_equals_the_one_that_came_first_comes_first() -> None:
    joined = {name: -float(number) for number, name in enumerate(NAMES)}
    for number in range(20):
        assert worst_first(equals(number, joined)) == sorted(NAMES, reverse=True)


def test_a_name_cannot_be_chosen_for_its_lots() -> None:
    # The best of many names at one time of arrival is an ordinary one a microsecond later.
    names = [f"app{number}" for number in range(1000)]
    best = min(names, key=lambda name: turn(name, 10.0, 7))
    others = [turn(name, 10.000001, 7) < turn(best, 10.000001, 7) for name in names]
    assert sum(others) > 10


def test_of_equal_holders_the_one_that_came_last_gives_its_leases_first() -> None:
    gpus = {f"g{i}": Gpu(f"g{i}", "m") for i in range(6)}
    for early, late in (("a", "b"), ("b", "a")):
        table = LeaseTable()
        for i in range(6):
            table.grant(f"g{i}", early if i < 3 else late, 50.0)
        apps = {
            early: AppRecord("s", 1.0, 0.0, rho=1.0),
            late: AppRecord("s", 2.0, 0.0, rho=1.0),
            "new": AppRecord("s", 3.0, 0.0),
        }
        assert {lease.app for lease in leases_to_recall("new", gpus, table, apps, SETTINGS, 4.0)[:1]} == {late}


def test_the_status_counts_apps_in_the_order_in_which_they_bid() -> None:
    cluster = Cluster(1, replace(SETTINGS, lease_s=1000))
    cluster.join("holder", Job(1, 1e6))
    for name in ("y", "x"):
        cluster.wait(1)
        cluster.join(name, Job(1, 1e6))
    cluster.wait(30)
    for name in ("y", "x"):
        cluster.arbiter.state.apps[name].rho = cluster.arbiter.state.apps[name].best = 1.0
    for lease in cluster.arbiter.state.leases:
        lease.heir, lease.ending = None, False
    waits = {name: app["waits"].split("; ")[-1] for name, app in view(cluster.arbiter.state).items()}
    # "y" came before "x".
    assert (waits["y"], waits["x"]) == ("0 apps are further behind", "1 apps are further behind")
