"""Results of stock Ray Tune as events: their devices, their files, and what is no record."""

from __future__ import annotations

import json

import pytest

from benchmarks.stock_events import events_from_tune_results
from fluidtune.report.events import EventLogError
from fluidtune.report.occupancy import held_part, occupancy_of


def test_records_of_a_stock_run():
    records = [
        {"trial": "b", "start": 2, "end": 6, "device": 1},
        {"trial": "a", "start": 0, "end": 4, "device": 0},
        {"trial": "c", "start": 4, "end": 8, "device": 0},
        {"trial": "none", "start": 3, "end": 3, "device": 1},
    ]
    use = occupancy_of(events_from_tune_results(records, devices=3))
    assert [(i.trial, i.device, i.start, i.end) for i in use.intervals] == [
        ("a", 0, 0, 4),
        ("b", 1, 2, 6),
        ("c", 0, 4, 8),
    ]
    assert held_part(use) == pytest.approx(12 / 24)
    with pytest.raises(EventLogError, match="no record of a trial's time"):
        events_from_tune_results([{"trial": "a", "start": 3}])
    with pytest.raises(EventLogError, match="end >= start"):
        events_from_tune_results([{"trial": "a", "start": 3, "end": 2}])
    assert occupancy_of(events_from_tune_results([], devices=2)).intervals == []


def test_files_of_a_stock_run(tmp_path):
    for name, times in {"t1": [10, 14], "t2": [11, 21]}.items():
        (tmp_path / name).mkdir()
        rows = [{"trial_id": name, "timestamp": t, "time_this_iter_s": 2.0, "training_iteration": 1} for t in times]
        (tmp_path / name / "result.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    use = occupancy_of(events_from_tune_results(tmp_path))
    assert [(i.trial, i.device, i.start, i.end) for i in use.intervals] == [
        ("t1", 0, 8, 14),
        ("t2", 1, 9, 21),
    ]
    records = [{"trial": "a", "start": 0, "end": 1, "device": [0, 1]}]
    (tmp_path / "list.json").write_text(json.dumps(records))
    assert len(occupancy_of(events_from_tune_results(tmp_path / "list.json")).intervals) == 2
    (tmp_path / "bad.json").write_text("hello")
    with pytest.raises(EventLogError, match=r"bad\.json"):
        events_from_tune_results([tmp_path / "bad.json"])
