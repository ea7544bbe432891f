"""The figures of a run, computed by hand."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from fluidtune.report.fold import fold_of
from fluidtune.report.summary import WidthFigures, duration, render, summarise
from tests.report.makers import added, begin, ended, ev, group, over, resized, resizing, result, started, text_of


def by_hand() -> list:
    return [
        begin(100, 2),
        group(100),
        *(added(100, trial) for trial in "abc"),
        ev(101, "worker_started", worker="w0", device=0, pid=1, seconds=1.0),
        ev(101, "worker_started", worker="w1", device=1, pid=2, seconds=1.0),
        started(102, "a", 0, share=0.5),
        started(102, "b", 0, share=0.5),
        started(102, "c", 1),
        result(104, "c", 1, 2.0, 1.0, 0.7),
        result(105, "a", 1, 3.0, 0.5, 0.9),
        result(105, "b", 1, 3.0, 0.5, 0.8),
        result(106, "c", 2, 2.0, 1.0, 0.6),
        ended(106, "a"),
        ended(106, "b", "failed"),
        resized(107, "c", 1, 0),
        result(108, "c", 3, 1.0, 2.0, 0.5),
        ev(109, "worker_lost", worker="w0", device=0, reason="killed"),
        ev(109, "trial_suspended", trial="c", reason="its worker died"),
        ev(110, "recovered", trial="c", iteration=3, reason="worker lost"),
        started(110, "c", 1, resumed=True),
        ev(111, "resize_failed", trial="c", devices=[1], reason="x"),
        ended(112, "c", "paused"),
        over(112, 12, 3, {"trial": "c", "metric": 0.5}),
    ]


def test_the_figures():
    summary = summarise(by_hand())
    assert (summary.run, summary.kind, summary.metric, summary.mode) == ("test", "cpu", "loss", "min")
    assert (summary.finished, summary.restored, summary.wall_seconds) == (True, 0, 12)
    assert (summary.devices, summary.trials) == (2, 3)
    assert summary.endings == {"stopped": 1, "failed": 1, "paused": 1}
    # Device 0: a and b 102 to 106, c 107 to 109. Device 1: c 102 to 109 and 110 to 112.
    assert summary.held_device_seconds == pytest.approx(4 + 2 + 7 + 2)
    assert summary.available_device_seconds == 24
    # Iterations: a and b 3 s at half a device, c 4 s at one and 1 s at two. c was started a second time for nothing.
    assert summary.utilisation == pytest.approx(9 / 24)
    assert asdict(summary.time_use) == pytest.approx({"iterating": 9, "starting": 2, "between": 4, "idle": 9})
    text = text_of(render(summary))
    assert "37.5% (9 s in iterations of 24 s device time)" in text and "starts 8.3%" in text
    assert summary.packing_levels == {0: pytest.approx(9), 1: pytest.approx(11), 2: pytest.approx(4)}
    assert summary.widths == {
        0.5: WidthFigures(2, 3.0, 3.0),
        1.0: WidthFigures(2, 2.0, 4.0),
        2.0: WidthFigures(1, 1.0, 2.0),
    }
    assert (summary.resizes, summary.resizes_failed) == (1, 1)
    assert (summary.workers_started, summary.workers_lost, summary.recoveries, summary.devices_lost) == (2, 1, 1, 0)
    assert (summary.best_trial, summary.best_metric) == ("c", 0.5)


def test_resizes_are_counted_by_their_reasons():
    def changes(t: float, why: str, *devices: int) -> list:
        return [resizing(t, "a", [0], devices, why=why), resized(t + 1, "a", *devices)]

    events = [begin(0, 2), group(0), added(0, "a"), started(1, "a", 0)]
    events += [*changes(2, "idle_devices", 0, 1), *changes(4, "waiting_trials", 0), *changes(6, "idle_devices", 0, 1)]
    events += [{**resized(8, "a", 0), "reason": "a worker was lost", "why": "worker_lost"}, resized(9, "a", 0, 1)]
    summary = summarise([*events, over(10)])
    assert summary.resize_reasons == {"idle_devices": 2, "waiting_trials": 1, "worker_lost": 1, "unknown": 1}
    assert "why: 2 x idle devices, 1 x waiting trials, 1 x worker lost, 1 x unknown" in text_of(render(summary))
    old = summarise(by_hand())
    assert old.resize_reasons == {"unknown": 1} and "why" not in text_of(render(old))


def test_a_run_that_was_killed_says_so_and_knows_its_best_so_far():
    summary = summarise(by_hand()[:15])
    assert (summary.finished, summary.wall_seconds) == (False, 6)
    assert summary.endings == {"unfinished": 2, "stopped": 1}
    assert (summary.best_trial, summary.best_metric) == ("c", 0.6)
    # As Tune's ``get_best_result`` by default: by the last results.
    assert summarise([*by_hand()[:15], result(106, "c", 3, 2.0, 1.0, 0.95)]).best_trial == "b"


def test_what_was_done_twice_after_a_driver_that_died_and_one_that_ended():
    """By its own driver a trial repeats what was reported since its commit; by another one also what Tune lost."""
    events = [*by_hand()[:15], result(107, "a", 2, 1.0, 1.0), begin(120, 2), added(120, "d")]
    events += [
        ev(121, "went_on", trial="c", iteration=1, reported=1),
        ev(122, "went_on", trial="c", iteration=2, reported=2),
    ]
    events += [{**result(122, "a", number, 1.0, 1.0), "kept": True} for number in (2, 3)]  # the first is in the log
    events += [ev(123, "went_on", trial="d", iteration=1, reported=3), over(130), begin(140, 2)]
    assert [line.iteration for line in fold_of(events).trials["a"].lines()][-3:] == [1, 2, 3]
    first, second = summarise(events).restores
    assert first == {"at": 20.0, "seconds": 13.0, "died": True, "trials": {"c": [1, 1]}}
    assert second == {"at": 40.0, "seconds": 10.0, "died": False, "trials": {}} and summarise(events).done_twice == 3
    said = text_of(render(summarise(events)))
    assert "after 20 s: another driver goes on, 13 s after the one before it died: c from iteration 1" in said
    assert "0, driver restored 2 times, 3 iterations done twice" in said


def test_the_bound_of_a_run():
    """Two devices, one iteration of 2 s each for three trials: 3 s of area each; the third trial waits."""
    events = [
        begin(0, 2),
        group(0),
        *(added(0, trial) for trial in "abc"),
        started(0, "a", 0),
        started(0, "b", 1),
        *(result(2 * k, trial, k, 2.0, 1.0) for k in (1, 2) for trial in "ab"),
        ended(4, "a"),
        ended(4, "b"),
        started(4, "c", 0),
        *(result(4 + 2 * k, "c", k, 2.0, 1.0) for k in (1, 2)),
        ended(8, "c"),
        over(8, 8, 3),
    ]
    bound = summarise(events).bound
    assert bound is not None
    assert bound.seconds == pytest.approx(6.0, rel=1e-3) and bound.ratio == pytest.approx(8 / 6, rel=1e-3)
    assert (bound.path_seconds, bound.area_seconds) == (pytest.approx(4.0), pytest.approx(6.0, rel=1e-3))
    assert "6 s, the run took 1.33 times that" in text_of(render(summarise(events)))
    assert summarise([*events[:5], over(8, 8, 3)]).bound is None
    # A third device that came when another had gone leaves two at once.
    late = ev(3, "device_lost", device=1), ev(3, "device_gained", device=2, node="local")
    again = summarise(sorted([*events, *late], key=lambda event: event["t"])).bound
    assert again is not None and again.area_seconds == bound.area_seconds


def test_a_trial_that_starts_for_ever_counts_as_start():
    events = [begin(0, 2), started(1, "a", 0), started(2, "b", 1), ev(9, "trial_suspended", trial="b"), ended(12, "a")]
    found = summarise(events).time_use
    assert (found.iterating, found.starting, found.between) == (0, pytest.approx(11 + 7), 0)
    # One that is resized while it starts.
    grows = [begin(0, 2), started(0, "a", 0), resized(5, "a", 0, 1), result(10, "a", 1, 1.0, 2.0), ended(10, "a")]
    assert summarise(grows).time_use.starting == 5 + 2 * 4


def test_docs_and_code_name_the_same_figures():
    found = summarise(by_hand()).as_dict()
    keys = set(found) | {f"widths.*.{key}" for key in found["widths"]["0.5"]}
    keys |= {f"{part}.{key}" for part in ("bound", "time_use") for key in found[part]}
    keys |= {f"restores.*.{key}" for key in summarise([*by_hand(), begin(200, 1)]).restores[0]}
    page = (Path(__file__).parents[2] / "docs" / "summary.md").read_text()
    assert set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)) == keys


@pytest.mark.parametrize(
    "seconds, text",
    [
        (4.25, "4.25 s"),
        (0.0249, "0.0249 s"),
        (5.75e-05, "less than 1 ms"),
        (0, "0 s"),
        (-1e-12, "0 s"),
        (-7, "-7 s"),
        (185, "3 min 05 s"),
        (-3600, "-1 h 00 min"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text
