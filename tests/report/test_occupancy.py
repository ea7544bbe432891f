"""Which trial held which device when: cases computed by hand, and properties of every run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.report.events import EventDict
from fluidtune.report.occupancy import (
    Interval,
    available_seconds,
    busy_over_time,
    device_steps,
    held_part,
    held_seconds,
    occupancy_of,
    packing_levels,
)
from tests.report.makers import begin, ended, ev, over, resized, started


def test_a_device_that_is_opened_for_one_more_is_shared():
    use = occupancy_of([begin(0, 1), started(0, "a", 0), started(4, "b", 0, share=0.5), over(10)])
    assert sorted(use.intervals) == [
        Interval("a", 0, 0.5, 4, 10),
        Interval("a", 0, 1, 0, 4),
        Interval("b", 0, 0.5, 4, 10),
    ]


def test_a_failed_resize():
    fail = ev(5, "resize_failed", trial="a", devices=[0], reason="x")
    use = occupancy_of([begin(0, 2), started(0, "a", 0), fail, over(10)])
    assert use.intervals == [Interval("a", 0, 1, 0, 10)]
    use = occupancy_of([begin(0, 2), started(0, "a", 0, 1), fail, over(10)])
    assert use.intervals[2:] == [Interval("a", 0, 1, 5, 10)]
    use = occupancy_of([begin(0, 2), started(0, "a", 0), ended(3, "a"), fail, over(10)])
    assert use.intervals == [Interval("a", 0, 1, 0, 3)]


def test_a_lost_device_frees_all_that_the_trial_held():
    gained = ev(8, "device_gained", device=1, node="n")
    again = [ev(4, "device_lost", device=1), started(6, "a", 0, resumed=True), gained, gained]
    use = occupancy_of([begin(0, 2), started(0, "a", 0, 1), *again, over(10)])
    assert use.intervals == [Interval("a", device, 1, 0, 4) for device in (0, 1)] + [Interval("a", 0, 1, 6, 10)]
    assert use.available == {0: [(0, 10)], 1: [(0, 4), (8, 10)]}
    assert available_seconds(use) == 16
    assert held_part(use) == pytest.approx(12 / 16)
    busy = busy_over_time(use, [0, 4, 6, 8, 10])
    np.testing.assert_allclose(busy.devices[1], [1, np.nan, np.nan, 0])
    np.testing.assert_allclose(busy.total, [1, 0, 1, 0.5])


def lost(t: float, **trial: str) -> EventDict:
    return ev(t, "worker_lost", worker="w", device=0, reason="killed", **trial)


def test_a_lost_worker_without_a_trial_leaves_the_hold_until_the_recovery():
    recovered = ev(6, "recovered", trial="a", iteration=3, reason="worker lost")
    head = [begin(0, 1), started(0, "a", 0)]
    again = started(8, "a", 0, resumed=True)
    use = occupancy_of([*head, lost(4), recovered, again, over(10)])
    assert [(i.start, i.end) for i in use.intervals] == [(0, 6), (8, 10)]
    use = occupancy_of([*head, lost(4), again, {**recovered, "t": 9.0}, over(10)])
    assert [(i.start, i.end) for i in use.intervals] == [(0, 8), (8, 10)]


def test_a_restored_experiment_does_not_count_the_time_between():
    killed = [begin(0, 2), started(0, "a", 0), ev(10, "trial_suspended", trial="b")]
    use = occupancy_of([*killed, begin(50, 1), started(52, "a", 0), over(60)])
    assert use.drivers == [(0, 10), (50, 60)]
    assert use.wall_seconds == 20
    assert use.available == {0: [(0, 10), (50, 60)], 1: [(0, 10)]}
    assert [(i.start, i.end) for i in use.intervals] == [(0, 10), (52, 60)]
    assert held_part(use) == pytest.approx(18 / 30)


@st.composite
def valid_runs(draw: st.DrawFn) -> list[EventDict]:
    """Events in any order in which no device is given away beyond its free part."""
    devices = draw(st.integers(1, 4))
    there = set(range(devices))
    held: dict[str, tuple[list[int], float]] = {}
    events = [begin(0, devices)]
    now = 0.0

    def free(device: int) -> float:
        return 1 - sum(share for where, share in held.values() if device in where)

    for _ in range(draw(st.integers(0, 40))):
        now += draw(st.sampled_from([0.0, 0.1, 1.0, 2.5]))
        what = draw(st.sampled_from(["start", "start", "resize", "end", "suspend", "worker", "lose", "gain", "killed"]))
        trial = draw(st.sampled_from("abcdef"))
        if what == "start" and trial not in held:
            share = draw(st.sampled_from([1.0, 1.0, 0.5, 1 / 3, 0.25]))
            room = sorted(device for device in there if free(device) >= share - 1e-9)
            if room:
                where = room[: draw(st.integers(1, len(room)))] if share == 1 else [draw(st.sampled_from(room))]
                held[trial] = (where, share)
                events.append(started(now, trial, *where, share=share))
        elif what == "resize" and trial in held:
            mine = held.pop(trial)[0]
            room = sorted(device for device in there if free(device) >= 1 - 1e-9)
            if not set(mine) <= set(room):
                held[trial] = (mine, 1.0) if len(mine) > 1 else (mine, events_share(events, trial))
                continue
            where = [mine[0], *(device for device in room if device != mine[0] and draw(st.booleans()))]
            held[trial] = (where, 1.0)
            events.append({**resized(now, trial, *where), "share": 1.0})
        elif what in ("end", "suspend", "worker") and trial in held:
            where = held.pop(trial)[0]
            leaves = {
                "end": ended(now, trial),
                "suspend": ev(now, "trial_suspended", trial=trial),
                "worker": {**lost(now, trial=trial), "device": where[0]},
            }
            events.append(leaves[what])
        elif what == "lose" and there:
            gone = draw(st.sampled_from(sorted(there)))
            there.discard(gone)
            for other in [other for other, (where, _) in held.items() if gone in where]:
                del held[other]
            events.append(ev(now, "device_lost", device=gone))
        elif what == "gain":
            new = draw(st.integers(0, devices))
            there.add(new)
            events.append(ev(now, "device_gained", device=new, node="n"))
        elif what == "killed" and draw(st.integers(0, 4)) == 0:
            held.clear()
            now += 5
            there = set(range(devices))
            events.append(begin(now, devices))
    if draw(st.booleans()):
        events.append(over(now + 1))
    return events


def events_share(events: list[EventDict], trial: str) -> float:
    return next(
        event["share"]
        for event in reversed(events)
        if event["event"] in ("trial_started", "resized") and event["trial"] == trial
    )


@given(valid_runs())
@settings(max_examples=150, deadline=None)
def test_no_device_is_held_more_than_it_is_available(events):
    use = occupancy_of(events)
    for device, steps in device_steps(use).items():
        # Computed from the intervals, because the steps are clipped.
        for left, right in zip(steps.times[:-1], steps.times[1:], strict=True):
            middle = (left + right) / 2
            total = sum(i.share for i in use.intervals if i.device == device and i.start <= middle < i.end)
            there = any(start <= middle < end for start, end in use.available[device])
            assert total <= there + 1e-9
    for interval in use.intervals:
        assert use.start <= interval.start < interval.end <= use.end
    by_hand = sum(i.share * (i.end - i.start) for i in use.intervals)
    assert held_seconds(use) == pytest.approx(by_hand)
    assert 0 <= held_part(use) <= 1
    assert sum(packing_levels(use).values()) == pytest.approx(available_seconds(use))
    if use.end > use.start:
        busy = busy_over_time(use, np.linspace(use.start, use.end, 7))
        for part in [busy.total, *busy.devices.values()]:
            assert np.all(np.isnan(part) | ((part >= 0) & (part <= 1)))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=20), st.data())
@settings(max_examples=50, deadline=None)
def test_utilisation_is_at_most_1_even_for_a_log_that_breaks_the_rules(trials, data):
    events = [begin(0, 1)]
    for t, trial in enumerate(trials):
        events.append(started(t, trial, 0, share=data.draw(st.sampled_from([0.5, 1.0, 2.0]))))
    assert 0 <= held_part(occupancy_of(events)) <= 1
