"""Drivers that are silent: which of them are dead, by their signs of life, and what the arbiter does then."""

from __future__ import annotations

from types import SimpleNamespace

from themis_bridge.app_record import AppRecord
from themis_bridge.shell.cluster_watch import SILENT_S, SilentDrivers


def test_only_drivers_that_are_silent_and_gone_are_dead():
    def app(session: str, heard: float, life: str) -> AppRecord:
        return AppRecord(session, 0.0, heard, life=life)

    asked: list[str] = []

    def is_gone(life: str) -> bool:
        asked.append(life)
        return life != "there"

    late = 100.0 - SILENT_S - 1
    state = SimpleNamespace(
        clock=100.0,
        apps={"dead": app("d", late, "x"), "stands": app("s", late, "there"), "speaks": app("p", 99.9, "y")},
        away={"away": app("w", 0.0, "z"), "old": app("o", 0.0, "")},
    )
    drivers = SilentDrivers(is_gone, lambda: 0.0)
    dead = drivers.look(drivers.silent(state), 1.0)
    assert sorted((each.app, each.session) for each in dead) == [("away", "w"), ("dead", "d")]
    assert sorted(asked) == ["there", "x", "z"]
    assert drivers.look([], 1.0) == []
