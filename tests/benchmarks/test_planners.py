"""`benchmarks.planners`: what holds of the plans, how good they are, the relaxed bound, and the pricing of mixtures."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings

from benchmarks.planners.best import plan
from benchmarks.planners.validity import check
from fluidtune.planning import TrialLoad, lower_bound
from tests.planning.groups import Group, equal, groups


@settings(deadline=None, max_examples=80)
@given(groups())
@example(([TrialLoad("a", 1e6), TrialLoad("b", 1e-3), TrialLoad("c", 1e-3)], 1, 2, 2))
@example(([TrialLoad("a", 10.0), TrialLoad("b", 1.0), TrialLoad("c", 1.0)], 4, 2, 4))
@example(([], 1, 1, 1))
def test_a_plan_is_valid_and_not_below_the_bound(group: Group) -> None:
    loads, n, c, d = group
    schedule = plan(loads, n, c=c, d=d)
    check(schedule, loads, n, c=c, d=d)
    assert schedule.makespan >= lower_bound(loads, n, c=c, d=d) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("loads", "n", "c", "d", "optimum"),
    [
        (equal(1), 4, 2, 4, 25.0),
        (equal(2), 4, 2, 4, 50.0),  # two devices each; sharing would leave devices idle
        (equal(3), 2, 1, 2, 150.0),  # the third trial is cut in two, or spread over both devices
        (equal(12), 3, 4, 1, 100.0),  # free packing, exactly full
        (equal(4, alpha=2.5), 2, 2, 1, 200.0),  # packing that does not pay is not used
        (equal(5), 2, 2, 1, 125.0),
        ([TrialLoad("a", 100.0), TrialLoad("b", 1.0), TrialLoad("c", 1.0)], 5, 2, 4, 25.0),
    ],
)
def test_best_finds_optima_that_are_known(loads: list[TrialLoad], n: int, c: int, d: int, optimum: float) -> None:
    assert plan(loads, n, c=c, d=d).makespan == pytest.approx(optimum, rel=2e-3)
