"""Decayed usage, and admission: both are off unless they are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.themis.cluster import SETTINGS, Cluster, Job
from themis_bridge import messages as m
from themis_bridge.arbiter_state import decayed
from themis_bridge.arbiter_view import view

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
    cluster.send(m.AppLeft("old", "s"))
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
    cluster.send(m.AppLeft("a", "s"))
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
    assert cluster.join("b", Job(1, 1e5)).refused is None
    cluster.send(m.AppLeft("b", "s"))
    assert cluster.join("late", Job(1, 1e5)).refused is None
