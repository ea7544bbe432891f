"""What the arbiter's status says of each app to an operator."""

from __future__ import annotations

import re
from dataclasses import replace

from fluidtune.commands.arbiter import app_lines
from tests.themis.cluster import SETTINGS, Cluster, Job
from themis_bridge import messages as m
from themis_bridge.arbiter_view import view


def test_every_reason_to_wait() -> None:
    cluster = Cluster(2, replace(SETTINGS, quotas={"carl": 0}))
    cluster.join("a", Job(2, 1e5))
    cluster.join("c", Job(2, 1e5), user="carl")
    cluster.wait(20)
    waits = {name: app["waits"] for name, app in view(cluster.arbiter.state).items()}
    assert waits["a"] == ""
    assert waits["c"] == "the quota of user 'carl', 0 devices, is used up"
    cluster.send(m.Configured({"quotas": {"carl": None}}))
    assert re.fullmatch(
        r"all 2 devices are leased; the next one of another app is offered in \d+ s; 0 apps are further behind",
        view(cluster.arbiter.state)["c"]["waits"],
    )


def test_a_job_that_could_use_no_gpu_waits_for_none() -> None:
    # Seen: `arbiter status` said that it waits, and its former demand counted against newcomers.
    cluster = Cluster(2, replace(SETTINGS, most_demand=1.0))
    agent = cluster.join("a", Job(2, 1e5))
    cluster.wait(20)
    agent.work.jobs = 0
    for gpu, lease in list(agent.leases.items()):
        agent.vacated(gpu, lease.token)
    for _ in range(5):
        cluster.wait(1)
    app = view(cluster.arbiter.state)["a"]
    assert (app["leases"], app["demand"], app["waits"]) == ({}, 0, "")
    assert cluster.arbiter.state.why_not_admitted("b") == ""
    assert app_lines("a", app, "CPU")[0].startswith("  a: 0 of 0 CPUs")
    agent.work.jobs = 1
    for _ in range(5):
        cluster.wait(1)
    assert len(cluster.holds("a")) == view(cluster.arbiter.state)["a"]["demand"] == 1


def test_rho_is_told_with_the_devices_that_it_is_of() -> None:
    """Seen: "rho 97.94" of a job that held its fair share: at its last report it had held nothing."""
    cluster = Cluster(2)
    cluster.join("a", Job(2, 1e5))
    seen = []
    for _ in range(60):
        cluster.wait(10)
        (app,) = view(cluster.arbiter.state).values()
        seen.append((len(app["leases"]), app["rho_gpus"], app["rho"] and round(app["rho"])))
    assert seen[0] == (2, 0, None) and seen[-1] == (2, 2, 1)
    assert "rho 1.00 with 2 at its last report" in app_lines("a", app, "GPU")[0]


def test_a_gpu_that_ray_cannot_reserve_is_a_reason() -> None:
    cluster = Cluster(2)
    cluster.impossible = {("g0", "a")}
    cluster.join("a", Job(2, 1e5))
    cluster.wait(1)
    (app,) = view(cluster.arbiter.state).values()
    assert app["waits"].startswith("Ray has no room for what it needs beside 1 devices")
