"""What an operator is told of each app."""

from __future__ import annotations

import re
from dataclasses import replace

from fluidtune.cli import _app_lines
from tests.themis.cluster import SETTINGS, Cluster, Job
from themis_bridge import messages as m
from themis_bridge.arbiter_view import shown_rho, view


def test_an_app_without_a_gpu_has_no_rho_and_a_reason() -> None:
    cluster = Cluster(1)
    cluster.join("a", Job(1, 1e5), user="anna")
    cluster.wait(20)
    cluster.join("b", Job(1, 1e5))
    cluster.wait(1)
    last = r"all 1 GPUs are leased; the next one of another app is offered in \d+ s; 0 apps are further behind"
    assert re.fullmatch(rf"it has not reported yet; {last}", view(cluster.arbiter.state)["b"]["waits"])
    while cluster.arbiter.state.apps["b"].rho is None:
        cluster.wait(1)
    apps = view(cluster.arbiter.state)
    assert (apps["a"]["waits"], apps["a"]["hosts"], apps["a"]["user"]) == ("", {"m0": 1}, "anna")
    assert (apps["b"]["rho"], apps["b"]["demand"], apps["b"]["hosts"]) == (None, 1, {})
    assert re.fullmatch(r"1 GPUs are promised to it, the first within \d+ s", apps["b"]["waits"])
    # With a GPU from now on it would be about on time. By its rho without a GPU it is far behind, which says nothing.
    best, rho = shown_rho(cluster.arbiter.state, "b"), cluster.arbiter.state.apps["b"].rho
    assert best is not None and rho is not None and best < 1.1 < 50 < rho
    lines = _app_lines("b", apps["b"])
    assert re.fullmatch(r"  b: 0 of 1 GPUs, no rho yet, user b, weight 1, doubt 1.00, \d+ s old", lines[0])
    assert lines[1].startswith("    waits: 1 GPUs are promised")


def test_every_reason_to_wait() -> None:
    cluster = Cluster(2, replace(SETTINGS, quotas={"carl": 0}))
    cluster.silent = {"mute"}
    cluster.join("mute")
    cluster.join("a", Job(2, 1e5))
    cluster.join("c", Job(2, 1e5), user="carl")
    cluster.wait(20)
    waits = {name: app["waits"] for name, app in view(cluster.arbiter.state).items()}
    assert waits["mute"].startswith("it has not reported yet; all 2 GPUs are leased; ")
    assert waits["a"] == ""
    assert waits["c"] == "the quota of user 'carl', 0 GPUs, is used up"
    cluster.send(m.Configured({"quotas": {"carl": None}}), m.AppLeft("mute", "s"))
    assert re.fullmatch(
        r"all 2 GPUs are leased; the next one of another app is offered in \d+ s; 0 apps are further behind",
        view(cluster.arbiter.state)["c"]["waits"],
    )


def test_a_job_that_could_use_no_gpu_waits_for_none() -> None:
    # docs/bugs.md, 334
    cluster = Cluster(2, replace(SETTINGS, most_demand=1.0))
    agent = cluster.join("a", Job(2, 1e5))
    cluster.wait(20)
    agent.work.jobs = 0
    cluster.send(*agent.vacated("g0"), *agent.vacated("g1"))
    for _ in range(5):
        cluster.wait(1)
    app = view(cluster.arbiter.state)["a"]
    assert (app["leases"], app["demand"], app["waits"]) == ({}, 0, "")
    assert cluster.arbiter.state.why_not_admitted("b") == ""
    assert _app_lines("a", app)[0].startswith("  a: 0 of 0 GPUs")
    agent.work.jobs = 1
    for _ in range(5):
        cluster.wait(1)
    assert len(cluster.holds("a")) == view(cluster.arbiter.state)["a"]["demand"] == 1


def test_a_gpu_that_ray_cannot_reserve_is_a_reason() -> None:
    cluster = Cluster(2)
    cluster.impossible = {("g0", "a")}
    cluster.join("a", Job(2, 1e5))
    cluster.wait(1)
    (app,) = view(cluster.arbiter.state).values()
    assert re.fullmatch(r"Ray could not reserve 1 free GPUs for it; next attempt in \d+ s", app["waits"])


def test_the_status_of_an_arbiter_of_an_earlier_version_is_shown() -> None:
    old = {"rho": 1.25, "age": 9.6, "contention": 1.0, "leases": {"g0": {}}}
    assert _app_lines("a", old) == ["  a: 1 leases, rho 1.25, 10 s old"]
