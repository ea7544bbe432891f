"""`benchmarks.planners`: what holds of the plans, how good they are, the relaxed bound, and the pricing of mixtures."""

from __future__ import annotations

from hypothesis import example, given, settings

from benchmarks.planners.best import plan
from benchmarks.planners.validity import check
from fluidtune.planning import TrialLoad, lower_bound
from tests.planning.groups import Group, groups


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
