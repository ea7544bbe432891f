"""Which trial held which device when: cases computed by hand, and properties of every run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.report.occupancy import (
    available_seconds,
    busy_over_time,
    device_steps,
    held_part,
    held_seconds,
    occupancy_of,
    packing_levels,
)
from tests.report.makers import begin, ev, over, started


def test_a_lost_device_frees_all_that_the_trial_held():
    gained = ev(8, "device_gained", device=1, node="n")
    again = [ev(4, "device_lost", device=1), started(6, "a", 0, resumed=True), gained, gained]
    use = occupancy_of([begin(0, 2), started(0, "a", 0, 1), *again, over(10)])
    assert [(*span[:4], span.end) for span in use.spans] == [("a", (0, 1), 1, 0, 4), ("a", (0,), 1, 6, 10)]
    assert use.available == {0: [(0, 10)], 1: [(0, 4), (8, 10)]}
    assert available_seconds(use) == 16
    assert held_part(use) == pytest.approx(12 / 16)
    busy = busy_over_time(use, [0, 4, 6, 8, 10])
    np.testing.assert_allclose(busy.devices[1], [1, np.nan, np.nan, 0])
    np.testing.assert_allclose(busy.total, [1, 0, 1, 0.5])


class Model:
    """A run that gives no device away beyond its free part; who held what when, and what was there, by definition."""

    def __init__(self, devices: int) -> None:
        self.now, self.events = 0.0, [begin(0, devices)]
        self.there = dict.fromkeys(range(devices), 0.0)
        self.available: dict[int, list[tuple[float, float]]] = {device: [] for device in self.there}
        self.held: dict[str, tuple[list[int], float, float]] = {}
        self.hurt: set[str] = set()
        #: Trial, device, share, begin and end.
        self.held_until_now: list[tuple[str, int, float, float, float]] = []

    def hold(self, trial: str, where: list[int], share: float = 1.0) -> None:
        """From now on it holds these, and nothing else."""
        devices, before, since = self.held.pop(trial, ([], 0.0, self.now))
        self.hurt.discard(trial)
        self.held_until_now += [(trial, device, before, since, self.now) for device in devices if since < self.now]
        if where:
            self.held[trial] = (where, share, self.now)

    def lose(self, device: int) -> None:
        for trial in self.holders(device):
            self.hold(trial, [])
        since = self.there.pop(device)
        self.available[device] += [(since, self.now)] if since < self.now else []

    def end(self) -> None:
        """The driver ends with its last event."""
        self.now = self.events[-1]["t"]
        for device in list(self.there):
            self.lose(device)

    def holders(self, device: int) -> list[str]:
        return [trial for trial, (where, *_) in self.held.items() if device in where]

    def room(self, share: float, without: str = "") -> list[int]:
        """The devices on which a trial can have this share."""
        held = {
            device: [self.held[trial][1] for trial in self.holders(device) if trial != without] for device in self.there
        }
        return sorted(device for device in held if sum(min(its, share) for its in held[device]) + share <= 1 + 1e-9)


@st.composite
def valid_runs(draw: st.DrawFn) -> Model:
    """Events in any order."""
    devices = draw(st.integers(1, 4))
    run = Model(devices)
    names = ["trial_started", "trial_started", "resized", "resize_failed", "trial_ended", "trial_suspended"]
    names += ["device_lost", "device_returned", "device_gained", "run_started"]
    names += ["worker_lost", "worker_lost", "recovered"]
    for _ in range(draw(st.integers(0, 40))):
        run.now += draw(st.sampled_from([0.0, 0.1, 1.0, 2.5]))
        what, trial = draw(st.sampled_from(names)), draw(st.sampled_from("abcdef"))
        where, share, _ = run.held.get(trial, ([], 0.0, 0.0))
        device = draw(st.integers(0, devices))
        fields: dict[str, Any] = {"trial": trial}
        if what == "trial_started" and not where:
            share = draw(st.sampled_from([1.0, 1.0, 0.5, 1 / 3, 0.25]))
            room = run.room(share)
            where = room[: draw(st.integers(1, 4))] if share == 1 else room[:1]
            if not where:
                continue
            for other in [each for each in run.holders(where[0]) if run.held[each][1] > share]:  # these make room
                run.hold(other, run.held[other][0], share)
            run.hold(trial, where, share)
            fields |= {"devices": where, "share": share, "resumed": False}
        elif what in ("resized", "resize_failed") and set(where) <= set(room := run.room(1.0, trial)) and where:
            new = [where[0], *(device for device in room if device != where[0] and draw(st.booleans()))]
            share = share if new == where else 1.0
            fields |= {"devices": new, **({} if what == "resized" else {"reason": "x"})}
            if what == "resized" or new != where:
                run.hold(trial, new, share)
        elif what in ("trial_ended", "trial_suspended"):
            run.hold(trial, [])
            fields |= {"ending": "stopped"} if what == "trial_ended" else {}
        elif what == "worker_lost":
            run.hurt.update(run.holders(device))
            fields = {"worker": "w", "device": device, "reason": "killed"}
        elif what == "recovered":
            if trial in run.hurt:
                run.hold(trial, [])
            fields |= {"iteration": 3, "reason": "worker lost"}
        elif what in ("device_lost", "device_returned") and device in run.there:
            run.lose(device)
            fields = {"device": device}
        elif what == "device_gained":
            run.available.setdefault(device, [])
            run.there.setdefault(device, run.now)
            fields = {"device": device, "node": "n"}
        elif what == "run_started":
            later = run.now + 5
            run.end()
            run.now, run.there = later, dict.fromkeys(range(devices), later)
            run.events.append(begin(later, devices))
            continue
        else:
            continue
        run.events.append(ev(run.now, what, **fields))
    if draw(st.booleans()):
        run.events.append(over(run.now + 1))
    run.end()
    return run


@given(valid_runs())
@settings(max_examples=150, deadline=None)
def test_what_was_held_and_what_was_there(run):
    use = occupancy_of(run.events)
    held = [(i.trial, device, i.share, i.start, i.end) for device, spans in use.by_device().items() for i in spans]
    assert sorted(held) == sorted(run.held_until_now) and use.available == run.available
    assert use.wall_seconds == pytest.approx(sum(end - start for start, end in use.drivers))
    for device, steps in device_steps(use).items():
        # Computed from the spans, because the steps are clipped.
        for left, right in zip(steps.times[:-1], steps.times[1:], strict=True):
            middle = (left + right) / 2
            total = sum(i.share for i in use.by_device()[device] if i.start <= middle < i.end)
            there = any(start <= middle < end for start, end in use.available[device])
            assert total <= there + 1e-9
    for span in use.spans:
        assert use.start <= span.start < span.end <= use.end
    by_hand = sum(i.width * (i.end - i.start) for i in use.spans)
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
