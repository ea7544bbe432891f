"""Which device a trial joins, and what part of it each gets: the answers that placement is given."""

from __future__ import annotations

from salus_share import LaneTable, Need, choose_device


def test_a_trial_joins_the_least_busy_trials_that_leave_it_the_memory() -> None:
    def chosen(need, devices):
        tables = {}
        for name, residents in devices.items():
            table = LaneTable(100)
            for index, resident in enumerate(residents):
                assert table.admit(str(index), resident.persistent, resident.ephemeral) is not None
            tables[name] = table, residents
        return choose_device(need, tables)

    half = Need(10, 20, 0.45)
    devices = {"busy": [Need(10, 20, 0.9)], "one": [half], "calm": [Need(20, 30, 0.4)], "unknown": [Need(10, 20)]}
    assert chosen(half, devices) == "calm"
    assert chosen(Need(10, 60, 0.3), devices) == "one", "in a lane of its own"
    assert chosen(half, {name: devices[name] for name in ("unknown", "busy")}) == "busy"
    assert chosen(half, {"one": [half], "fuller": [Need(20, 30, 0.45)]}) == "fuller"
    assert chosen(Need(60, 50), devices) is None
    assert chosen(Need(10, 70), {"turns": [Need(20, 10)]}) == "turns"
