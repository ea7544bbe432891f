"""The figures that benchmarks compute from recorded runs, and stock runs as events, without running a benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest

from benchmarks import autoscaling
from benchmarks.demo import fluid_iterations, stock_iterations
from benchmarks.first_result import descendants
from benchmarks.job import Watch
from benchmarks.resize import resizes
from benchmarks.stock_events import events_from_tune_results
from fluidtune.report.events import EventLogError
from fluidtune.report.occupancy import held_part, occupancy_of


def test_launches_match_places_with_first_results(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("benchmarks.job.time.time", lambda: now[0])
    watch = Watch()
    watch.setup()

    def at(moment, what, trial):
        now[0] = moment
        told = SimpleNamespace(trial_id=trial)
        if what == "result":
            watch.on_trial_result(iteration=0, trials=[], trial=told, result={})
        else:
            watch.on_trial_complete(iteration=0, trials=[], trial=told)

    at(103, "result", "a")
    at(104, "result", "b")
    at(105, "result", "a")
    at(106, "complete", "a")
    at(106.5, "result", "c")
    at(107, "complete", "c")
    at(108, "result", "d")
    at(109, "complete", "b")
    assert watch.launches(2) == [3.0, 4.0, 0.5, 1.0]


def _event(t, event, **fields):
    return {"t": t, "event": event, "trial": "a", **fields}


def test_resizes_last_from_the_decision_to_the_first_result_after():
    events = [
        _event(1.0, "resize_started", devices_from=[0], devices_to=[0, 1]),
        _event(1.1, "worker_started", trial=None),
        _event(1.5, "trial_result"),
        _event(4.0, "resized", seconds=0.1),
        _event(4.0, "trial_result"),
        _event(5.0, "resize_started", devices_from=[0, 1], devices_to=[0]),
        _event(5.2, "resized", seconds=0.2),
        _event(5.25, "trial_result"),
        _event(6.0, "resize_started", devices_from=[0], devices_to=[0, 1]),
        _event(6.1, "trial_result", trial="b"),
        _event(6.5, "resized", seconds=0.3),
        _event(6.5, "divided", workers=2, seconds=0.05, stall=0.01),
        _event(6.5, "trial_result"),
        _event(7.0, "resize_started", devices_from=[0, 1], devices_to=[0]),
        _event(7.5, "trial_ended"),
    ]
    found = resizes(events)
    assert found == {"grow": [3.0, 0.5], "shrink": [0.25], "divided": [pytest.approx(0.55)], "stall": [0.01]}


def test_iterations_of_a_fluid_run_lie_on_the_devices_held():
    events = [
        _event(1.0, "trial_started", devices=[1]),
        _event(3.0, "trial_result", seconds=0.5),
        _event(4.0, "resized", devices=[1, 0], seconds=0.1),
        _event(4.0, "trial_result", seconds=0.25),
    ]
    assert fluid_iterations(events) == [
        {"trial": "a", "start": 2.5, "end": 3.0, "device": [1]},
        {"trial": "a", "start": 3.75, "end": 4.0, "device": [1, 0]},
    ]


def test_iterations_of_a_stock_trial_that_follow_each_other_do_not_overlap(tmp_path):
    """Tune rounds times to whole seconds: iterations of 1.4 s end at 10, 11, 12, 14. Then the trial waits."""
    (tmp_path / "a").mkdir()
    rows = [{"timestamp": end, "time_this_iter_s": 1.4} for end in (10, 11, 12, 14, 30)]
    (tmp_path / "a" / "result.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = stock_iterations(tmp_path)
    assert sum(one["end"] - one["start"] for one in found) == pytest.approx(5 * 1.4)
    assert all(two["start"] >= one["end"] for one, two in pairwise(found))
    assert found[-1]["end"] == pytest.approx(30, abs=1)


def test_iterations_of_a_stock_run_come_from_tunes_results(tmp_path):
    for trial, end in (("a", 10.0), ("b", 12.0)):
        (tmp_path / trial).mkdir()
        row = {"timestamp": end, "time_this_iter_s": 2.0}
        (tmp_path / trial / "result.json").write_text(json.dumps(row) + "\n")
    assert stock_iterations(tmp_path) == [
        {"trial": "a", "start": 8.0, "end": 10.0},
        {"trial": "b", "start": 10.0, "end": 12.0},
    ]


def test_gpus_that_come_are_used_from_the_window_that_is_nearly_full_and_are_gone_when_nobody_has_them():
    # The GPUs come at 10 and 20. Trial "b" starts on the second at 25; "a" ends at 60 and "b" at 70.
    seen = [(0.0, 0.0, 0.0), (10.0, 1.0, 0.0), (20.0, 2.0, 0.0), (71.0, 2.0, 1.0), (72.0, 2.0, 2.0), (90.0, 0.0, 0.0)]
    iterations = {"a": [(12.0, 36.0), (36.0, 60.0)], "b": [(25.0, 65.0), (65.0, 70.0)]}
    found = autoscaling.figures(seen, iterations, began=1.0, ended=70.5)
    assert (found["first_gpu"], found["second_gpu"], found["used"]) == (9.0, 19.0, 5.0)
    assert (found["job"], found["freed"], found["gone"], found["utilisation"]) == (69.5, 1.5, 19.5, 1.0)


def test_what_a_child_has_computed_is_seen():
    busy = "sum(range(10**6)); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        seen = [each.seconds for each in descendants() if busy in each.command]
        child.communicate(b"\n")
    assert len(seen) == 1
    assert seen[0] > 0


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
