"""Jobs that share a cluster: the one rho, and who has which devices."""

import json

import pytest

from benchmarks import tenants
from benchmarks.tenants import FLUID, STOCK, THEMIS, Tenant

WIDE, NARROW = Tenant("wide", 0, 16, 1), Tenant("narrow", 0, 2, 1)


def ran(start, end):
    return {"start": start, "end": end, "iterations": 1, "errors": 0}


def test_rho_is_measured_against_a_share_of_the_cluster_and_no_more_than_the_job_can_use():
    found = {"wide": ran(0.0, 100.0), "narrow": ran(50.0, 100.0)}
    figures = tenants.fairness(found, {"wide": 400.0, "narrow": 100.0}, [WIDE, NARROW], 8)
    # On average 1.5 jobs are there while the wide one is, and 2 while the narrow one is. The share of that is 4
    # devices, and it can use 2: it is owed 100 / 2 s, and not 100 / 2 * 2.
    assert figures["rho"] == pytest.approx({"wide": 100 / (400 / (8 / 1.5)), "narrow": 50 / (100 / 2)})
    assert figures["worst_rho"] == figures["rho"]["wide"] and figures["makespan"] == 100.0


@pytest.mark.parametrize(("devices", "sides"), [("emulated:8", [STOCK, THEMIS]), ("cpu:2", [STOCK, FLUID, THEMIS])])
def test_no_side_has_devices_that_jobs_do_not_keep_from_each_other(devices, sides, capsys):
    # Seen: on eight emulated GPUs the side without an arbiter had up to 24 of them.
    def run(side, jobs, options, profile, limit):
        seconds = {STOCK: 12.0, FLUID: 9.0, THEMIS: 6.0}[side]
        return {job.name: {**ran(0.0, seconds), "trial_seconds": 10.0} for job in jobs}

    tenants.main(["--json", "--devices", devices], run)
    found = json.loads(capsys.readouterr().out)
    assert list(found["sides"]) == sides
    assert found["ratios"] == {"worst_rho": 2.0, "makespan": 2.0}
    alone = {"worst_rho": 1.5, "makespan": 1.5} if FLUID in sides else None
    assert found.get("ratios_without_arbiter") == alone
