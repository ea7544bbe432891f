"""The figures that benchmarks compute from recorded runs, and stock runs as events, without running a benchmark."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from benchmarks.demo import stock_iterations
from benchmarks.resize import resizes


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


def test_iterations_of_a_stock_trial_that_follow_each_other_do_not_overlap(tmp_path):
    """Tune rounds times to whole seconds: iterations of 1.4 s end at 10, 11, 12, 14. Then the trial waits."""
    (tmp_path / "a").mkdir()
    rows = [{"timestamp": end, "time_this_iter_s": 1.4} for end in (10, 11, 12, 14, 30)]
    (tmp_path / "a" / "result.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = stock_iterations(tmp_path)
    assert sum(one["end"] - one["start"] for one in found) == pytest.approx(5 * 1.4)
    assert all(two["start"] >= one["end"] for one, two in pairwise(found))
    assert found[-1]["end"] == pytest.approx(30, abs=1)
