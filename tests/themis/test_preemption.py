"""Leases that are recalled for a new app: which ones, and what becomes of them."""

from __future__ import annotations

import pytest

from tests.themis.cluster import SETTINGS, Cluster, Job
from themis_bridge.agent import Leave, Lost
from themis_bridge.app_record import AppRecord
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.locality import Gpu
from themis_bridge.preemption import leases_to_recall

#: Two machines of four and two of two.
GPUS = {f"m{m}g{i}": Gpu(f"m{m}g{i}", f"m{m}") for m, size in enumerate((4, 4, 2, 2)) for i in range(size)}


def recalled(held: dict[str, list[str]], rho: dict[str, float | None]) -> list[str]:
    """The GPUs whose leases are recalled for "new", if all leases end in 50 s."""
    return leases_to_recall("new", state({gpu: app for app, gpus in held.items() for gpu in gpus}, rho))


def state(held: dict[str, str], rho: dict[str, float | None]) -> ArbiterState:
    """All leases end in 50 s, and "new" has just come. ``held``: GPU -> its holder."""
    found = ArbiterState(SETTINGS)
    found.gpus = GPUS
    for gpu, app in held.items():
        found.leases.grant(gpu, app, 50.0)
    found.apps = {name: AppRecord("s", 0.0, 0.0, rho=value) for name, value in {**rho, "new": None}.items()}
    return found


def test_the_app_that_is_furthest_ahead_gives_and_keeps_a_share():
    half = [gpu for gpu in GPUS if gpu[:2] in ("m0", "m2")]
    rest = [gpu for gpu in GPUS if gpu not in half]
    # The share is a third of twelve: "ahead" gives two and keeps a share of four, then "behind" gives two.
    assert recalled({"ahead": half, "behind": rest}, {"ahead": 0.5, "behind": 0.9}) == ["m0g0", "m0g1", "m1g0", "m1g1"]
    # An app that has not reported its rho gives nothing.
    assert recalled({"ahead": half, "behind": rest}, {"ahead": None, "behind": 0.9}) == ["m1g0", "m1g1"]


@pytest.mark.parametrize(("asks", "number"), [(1.0, 3), (2.0, 4)])
def test_a_gpu_that_waits_is_free_for_those_who_ask_for_less(asks, number):
    # Seen: a newcomer had a share that was too small by the GPUs that waited for others, of which it could have none.
    there = state(dict.fromkeys(GPUS, "old"), {"old": 1.0, "waits": None})
    there.leases.drop(there.leases.get("m0g0"))
    there.leases.grant("m0g0", "waits", 50.0).waits = True
    there.apps["waits"].bundle, there.apps["new"].bundle = {"memory": 2.0}, {"memory": asks}
    assert len(leases_to_recall("new", there)) == number


def test_weights_and_doubts_count():
    there = state({gpu: "ab"[number % 2] for number, gpu in enumerate(GPUS)}, {"a": 1.0, "b": 0.9})

    def first(weight: float = 1.0) -> str:
        there.settings = SETTINGS.changed({"weights": {"a": weight}})
        return there.leases.get(leases_to_recall("new", there)[0]).app

    assert first() == "b"
    assert first(0.5) == "a"
    there.apps["a"].doubt = 2.0
    assert first() == "a"


def test_a_new_app_has_its_share_within_the_notice():
    cluster = Cluster(8)
    first = cluster.join("a", Job(8))
    cluster.wait(25)
    tokens = {gpu: view.token for gpu, view in first.leases.items()}
    ends = {lease.gpu: lease.expires for lease in cluster.arbiter.state.leases}
    cluster.notices.clear()
    cluster.join("idle", Job(0))
    cluster.wait(2 * SETTINGS.answer_s + 1)
    assert not cluster.notices and {lease.gpu: lease.expires for lease in cluster.arbiter.state.leases} == ends
    cluster.leave("idle")
    cluster.join("b", Job(8))
    assert not cluster.holds("b"), "nothing is taken without notice"
    assert {n.within for n in cluster.notices if isinstance(n, Leave)} == {SETTINGS.notice_s}
    assert not any(isinstance(n, Lost) for n in cluster.notices)
    cluster.wait(SETTINGS.notice_s + 1)
    assert len(cluster.holds("b")) == 4
    assert len({cluster.arbiter.state.gpus[gpu].machine for gpu in cluster.holds("b")}) == 1
    kept = cluster.holds("a")
    assert {gpu: view.token for gpu, view in first.leases.items()} == {gpu: tokens[gpu] for gpu in kept}
    assert all(cluster.arbiter.state.leases.get(gpu).expires >= ends[gpu] for gpu in kept), "the end is as promised"


def test_of_equal_holders_the_one_that_came_last_gives_first() -> None:
    for early, late in (("a", "b"), ("b", "a")):
        held = {gpu: early if number < 6 else late for number, gpu in enumerate(GPUS)}
        there = state(held, {"a": 1.0, "b": 1.0})
        there.apps[late].joined = 1.0
        assert there.leases.get(leases_to_recall("new", there)[0]).app == late
