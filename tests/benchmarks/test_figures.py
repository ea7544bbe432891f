"""The figures that benchmarks compute from recorded runs, and stock runs as events, without running a benchmark."""

from __future__ import annotations

import pytest

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
