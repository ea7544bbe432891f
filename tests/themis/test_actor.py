"""The arbiter's process without Ray: what it remembers of jobs, and when it writes its books."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from themis_bridge import messages as m
from themis_bridge.locality import Gpu
from themis_bridge.shell import actor


@pytest.fixture
def arbiter(monkeypatch, tmp_path):
    """An `ArbiterActor` of two cores of which no job makes use, without its thread, on a clock of its own."""
    gpus = [Gpu(f"m-{i}", "m") for i in range(2)]
    ray = SimpleNamespace(
        cluster_gpus=lambda unit: (gpus, {"m": "node:m"}),
        states=dict,
        remove=lambda *keys: None,
        reserve=lambda *args: None,
    )
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(actor, "reservations", ray)
    monkeypatch.setattr(actor, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: 1e9))
    monkeypatch.setattr(actor, "Gauge", lambda *args: None)
    monkeypatch.setattr(actor.ArbiterActor, "_loop", lambda self: None)
    made = actor.ArbiterActor({}, "CPU", str(tmp_path / "books.json"))
    return SimpleNamespace(actor=made, clock=clock, books=lambda: json.loads((tmp_path / "books.json").read_text()))


def test_a_job_that_starts_again_changed_gets_what_it_asks_for_now(arbiter):
    arbiter.actor.join("a", "one", {"CPU": 1.0})
    arbiter.actor.join("a", "other", {"CPU": 1.0, "disk": 1.0})
    assert arbiter.books()["bundles"] == {"a": {"CPU": 1.0}}, "it was refused"
    for _ in range(2):
        arbiter.clock.now += 15
        arbiter.actor.configure({})
    arbiter.actor.join("a", "two", {"CPU": 1.0, "memory": 4.0})
    assert arbiter.books()["bundles"] == {"a": {"CPU": 1.0, "memory": 4.0}}


def test_a_heartbeat_does_not_rewrite_the_books(arbiter):
    arbiter.actor.join("a", "one", {"CPU": 1.0})
    arbiter.clock.now = 1.0
    arbiter.actor.exchange("a", "one", [])
    before = arbiter.books()
    arbiter.clock.now = 3.0
    assert [type(each) for each in arbiter.actor.exchange("a", "one", [])] == [m.Leases]
    assert arbiter.books() == before
    arbiter.actor.configure({"lease_s": 100.0})
    assert arbiter.books()["settings"]["lease_s"] == 100.0
