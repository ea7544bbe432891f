"""StaticFluid and DynamicFluid, rule by rule."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.planning import TrialLoad, dynamic_fluid, plan, runtime, static_fluid
from tests.planning.groups import Group, groups


def loads_of(*heights: float) -> list[TrialLoad]:
    return [TrialLoad(f"t{i}", float(height)) for i, height in enumerate(heights)]


@pytest.mark.parametrize("d", [3, 4, 8])
def test_golden_figure_3_5(d: int) -> None:
    loads = loads_of(4, 4, 12, 30)
    assert static_fluid(loads, 5, c=2, d=d) == {"t0": 0.5, "t1": 0.5, "t2": 1, "t3": 3}
    assert plan(loads, 5, c=2, d=d, policy="static").makespan == 12


def test_a_fair_share_that_is_whole_but_for_rounding_is_whole() -> None:
    # 0.6 * 9 / 1.8 is 3; in floats, 2.9999999999999996.
    assert static_fluid(loads_of(0.1, 1.1, 0.6), 9, c=2, d=8)["t2"] == 3


@given(groups())
def test_static_widths_are_the_formula_in_order_of_height(group: Group) -> None:
    loads, n, c, d = group
    widths = static_fluid(loads, n, c=c, d=d)
    heights = {load.trial_id: load.height for load in loads}
    total = sum(Fraction(height) for height in heights.values())
    assert [heights[trial] for trial in widths] == sorted(heights.values(), reverse=True)
    for trial, width in widths.items():
        fair = Fraction(heights[trial]) * n / total if total else Fraction(0)
        # Exact, but for the tolerance for a fair share that is below a whole number by rounding only.
        near = round(fair) if abs(fair - round(fair)) < 1e-9 else math.floor(fair)
        assert width in {min(max(Fraction(whole), Fraction(1, c)), d) for whole in (math.floor(fair), near)}


@settings(deadline=None)
@given(groups(), st.data(), st.floats(0, 100))
def test_dynamic_follows_both_rules_of_algorithm_3_2(group: Group, data: st.DataObject, epsilon: float) -> None:
    loads, n, c, d = group
    allowed = [Fraction(1, p) for p in range(2, c + 1)] + list(range(1, d + 1))
    widths = {load.trial_id: data.draw(st.sampled_from(allowed)) for load in loads}
    wanted = static_fluid(loads, n, c=c, d=d)
    decided = dynamic_fluid(loads, widths, n, c=c, d=d, epsilon=epsilon)
    assert list(decided) == list(wanted)
    for load in loads:
        new, old = wanted[load.trial_id], widths[load.trial_id]
        after, before = runtime(load, new) + epsilon, runtime(load, old)
        up, down = new > old and after < before, new < old and float(new) * after < float(old) * before
        assert decided[load.trial_id] == (new if up or down else old)


def test_dynamic_refuses_a_trial_without_a_width_and_a_bad_epsilon() -> None:
    with pytest.raises(ValueError, match="'t0' has no width"):
        dynamic_fluid(loads_of(1), {}, 1, c=1, d=1, epsilon=0.0)
    with pytest.raises(ValueError, match="epsilon is -1"):
        dynamic_fluid(loads_of(1), {"t0": 1}, 1, c=1, d=1, epsilon=-1)


@pytest.mark.parametrize(
    ("n", "c", "d", "name"),
    [(0, 1, 1, "n"), (1, 0, 1, "c"), (1, 1, 0, "d"), (1.5, 1, 1, "n"), (True, 1, 1, "n")],
)
def test_limits_are_whole_numbers_from_one(n: int, c: int, d: int, name: str) -> None:
    for call in (static_fluid, plan):
        with pytest.raises(ValueError, match=rf"^{name} \("):
            call(loads_of(1), n, c=c, d=d)
