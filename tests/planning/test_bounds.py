"""The lower bound of a makespan."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given

from fluidtune.planning import TrialLoad, lower_bound, runtime
from tests.planning.groups import Group, groups


def test_lower_bound_by_hand() -> None:
    loads = [TrialLoad("a", 100.0, 1.2, 1.1), TrialLoad("b", 10.0)]
    # a alone needs 100 / 3 * 1.21 on min(d, n) = 3 devices; areas are 100 * 1.2 / 2 and 10 / 2.
    assert lower_bound(loads, 3, c=2, d=4) == pytest.approx(100 / 3 * 1.21)
    assert lower_bound(loads, 1, c=2, d=4) == pytest.approx(100.0)
    assert lower_bound([TrialLoad(f"t{i}", 10.0) for i in range(8)], 2, c=2, d=4) == 20
    assert lower_bound([], 3, c=2, d=4) == 0
    assert lower_bound([TrialLoad("z", 0.0)], 3, c=2, d=4) == 0


@given(groups())
def test_lower_bound_is_the_formula(group: Group) -> None:
    loads, n, c, d = group
    widths = [Fraction(1, p) for p in range(2, c + 1)] + list(range(1, min(d, n) + 1))
    times = max((min(runtime(load, w) for w in widths) for load in loads), default=0.0)
    areas = sum(min(float(w) * runtime(load, w) for w in widths) for load in loads) / n
    assert lower_bound(loads, n, c=c, d=d) == pytest.approx(max(times, areas))
