"""Jobs that share a cluster: the one rho."""

import pytest

from benchmarks import tenants
from benchmarks.tenants import Tenant

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
