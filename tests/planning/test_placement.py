"""List scheduling of given widths, and the check of schedules."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planners import check
from fluidtune.planning import Schedule, Segment, TrialLoad, Width
from fluidtune.planning.placement import place
from tests.planning.groups import Group, groups

HALF = Fraction(1, 2)
A, B, C = TrialLoad("a", 10.0), TrialLoad("b", 6.0), TrialLoad("c", 4.0)


def test_what_does_not_fit_queues_and_the_largest_that_fits_starts_first() -> None:
    schedule = place([C, B, A], {"a": 2, "b": 2, "c": 1}, 3)
    starts = {segment.trial_id: segment.start for segment in schedule.segments}
    # b is larger than c but waits for two devices. c does not wait for it.
    assert starts == {"a": 0, "c": 0, "b": 5}
    assert schedule.makespan == 8


def test_shares_fill_a_device_before_they_take_another() -> None:
    schedule = place([A, B, C], {"a": HALF, "b": 0.5, "c": 1}, 2)
    assert [segment.devices for segment in schedule.segments] == [(0,), (0,), (1,)]


def test_shares_of_different_sizes_share_a_device() -> None:
    third, sixth = Fraction(1, 3), Fraction(1, 6)
    schedule = place([A, B, C], {"a": HALF, "b": third, "c": sixth}, 1)
    assert [segment.start for segment in schedule.segments] == [0, 0, 0]


def test_freed_units_are_not_given_out_twice() -> None:
    # Three shares that end at different times leave stale entries of how much of the device was free.
    shares: dict[str, Width] = {"a": Fraction(1, 4), "b": Fraction(1, 3), "c": HALF, "e": 1}
    loads = [
        TrialLoad("a", 9.0),
        TrialLoad("b", 9.0, 1.0, 1.3),
        TrialLoad("c", 6.0, 1.5),
        TrialLoad("e", 4.0, 1.2),
    ]
    check(place(loads, shares, 1), loads, 1, c=4, d=1)


def test_bad_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="'a' has no width"):
        place([A], {}, 1)
    with pytest.raises(ValueError, match="width 2, but there are 1 devices"):
        place([A], {"a": 2}, 1)


@settings(deadline=None)
@given(groups(), st.data())
def test_any_widths_are_placed_without_over_commitment(group: Group, data: st.DataObject) -> None:
    loads, n, c, d = group
    allowed = [Fraction(1, p) for p in range(2, c + 1)] + list(range(1, min(d, n) + 1))
    widths = {load.trial_id: data.draw(st.sampled_from(allowed)) for load in loads}
    schedule = place(loads, widths, n)
    check(schedule, loads, n, c=c, d=d)
    assert all(segment.width == widths[segment.trial_id] for segment in schedule.segments)
    assert len(schedule.segments) == sum(load.height > 0 for load in loads)


GOOD = (
    Segment("a", (0, 1), 2, 0.0, 5.0),
    Segment("b", (2,), HALF, 0.0, 6.0),
    Segment("c", (2,), HALF, 0.0, 4.0),
)


def test_check_accepts_a_good_schedule() -> None:
    check(Schedule(GOOD), [A, B, C], 3, c=2, d=2)


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        (GOOD[:2], "'c' has done 0"),
        ((*GOOD, Segment("c", (2,), HALF, 6.0, 8.0)), "'c' has done 1.5"),
        ((*GOOD[:2], Segment("c", (0,), 1, 0.0, 4.0)), "device 0 is over-committed"),
        ((*GOOD[:2], Segment("c", (2,), 1, 5.9, 9.9)), "device 2 is over-committed at 5.9"),
        ((Segment("a", (0, 0), 2, 0.0, 5.0), *GOOD[1:]), "distinct devices"),
        ((Segment("a", (0,), 2, 0.0, 5.0), *GOOD[1:]), "distinct devices"),
        ((Segment("a", (0, 3), 2, 0.0, 5.0), *GOOD[1:]), "not among 0 to 2"),
        ((Segment("a", (0, 1, 2), 3, 6.0, 6.0 + 10 / 3), *GOOD[1:]), "wider than"),
        ((*GOOD[:2], Segment("c", (2,), Fraction(1, 3), 0.0, 4.0)), "narrower than"),
        ((*GOOD[:2], Segment("c", (0,), Fraction(2, 3), 6.0, 10.0)), "not 1/p"),
        ((*GOOD[:2], Segment("c", (2,), HALF, 4.0, 0.0)), "start"),
        (
            (*GOOD[:2], Segment("c", (0,), 1, 5.0, 7.0), Segment("c", (1,), 1, 6.0, 8.0)),
            "'c' runs twice at 6.0",
        ),
        ((*GOOD, Segment("x", (0,), 1, 7.0, 8.0)), "not among the loads"),
    ],
)
def test_check_names_what_is_broken(segments: tuple[Segment, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(Schedule(segments), [A, B, C], 3, c=2, d=2)
