"""Which trials fit together: the answers that placement is given."""

from __future__ import annotations

import pytest

from salus_share import Need, choose_device, divide, fit_together, policy, shares
from salus_share.policies import Standing


def test_fit_together_in_lanes_of_their_own_or_taking_turns() -> None:
    needs = [Need(10, 40), Need(10, 20), Need(10, 30)]
    assert not fit_together(needs, 110)
    assert fit_together(needs, 120)
    assert fit_together(needs, 70, own_lanes=False)
    assert not fit_together(needs, 69, own_lanes=False)
    assert fit_together([], 0)


def test_sharing_lanes_does_not_depend_on_how_greedily_they_are_opened() -> None:
    # Two lanes first (50 + 40) leave no room for the last P; one lane does.
    needs = [Need(1, 50), Need(1, 40), Need(30, 10)]
    assert fit_together(needs, 100, own_lanes=False)


def test_a_trial_joins_the_least_busy_trials_that_leave_it_the_memory() -> None:
    half = Need(10, 20, 0.45)
    devices = {"busy": [Need(10, 20, 0.9)], "one": [half], "calm": [Need(20, 30, 0.4)], "unknown": [Need(10, 20)]}
    assert choose_device(half, devices, 100) == "calm"
    assert choose_device(Need(10, 60, 0.3), devices, 100) == "one"
    assert choose_device(half, {name: devices[name] for name in ("unknown", "busy")}, 100) == "busy"
    assert choose_device(half, {"one": [half], "fuller": [Need(20, 30, 0.45)]}, 100) == "fuller"
    assert choose_device(Need(60, 50), devices, 100) is None


# Shares


def standing(arrival: int, **more: float) -> Standing:
    return Standing(arrival, **more)


@pytest.mark.parametrize("name", ["FAIR", "PACK", "HPT"])
def test_equals_share_equally(name: str) -> None:
    for count in (1, 2, 3, 7):
        lane = {str(k): standing(k, remaining=10.0 * k, service=float(k)) for k in range(count)}
        assert shares(policy(name), [lane]) == dict.fromkeys(lane, 1 / count)


def test_lanes_are_those_that_admission_in_this_order_gives() -> None:
    needs = {"a": Need(10, 40), "b": Need(10, 20), "c": Need(10, 30)}
    assert divide(needs, 120) == [["a"], ["b"], ["c"]]
    assert divide(needs, 70) == [["a", "b", "c"]]
    assert divide(needs, 120, max_lanes=1) == [["a", "b", "c"]]
    assert divide(needs, 69) is None
    assert divide({}, 0) == []
