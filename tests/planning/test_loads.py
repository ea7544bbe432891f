"""Run times, packing limits, the lower bound, and which loads, widths and times are refused."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidtune.planning import TrialLoad, lower_bound, packing_limit, plan, runtime
from tests.planning.groups import Group, groups


def test_runtime_is_equation_3_2() -> None:
    load = TrialLoad("a", 100.0, alpha=1.2, beta=1.1)
    assert runtime(load, 1) == 100
    assert runtime(load, Fraction(1, 3)) == pytest.approx(100 * 1.2**2)
    assert runtime(load, 0.5) == pytest.approx(100 * 1.2)
    assert runtime(load, 1 / 3) == runtime(load, Fraction(1, 3))
    assert runtime(load, 4) == pytest.approx(25 * 1.1**3)
    assert runtime(load, 4.0) == runtime(load, 4)
    assert runtime(TrialLoad("z", 0.0), 3) == 0


def test_an_overhead_beyond_floats_is_infinite_not_an_error() -> None:
    load = TrialLoad("a", 1.0, alpha=1e200)
    assert runtime(load, Fraction(1, 4)) == math.inf
    assert plan([load], 1, c=4, d=1, policy="static").makespan == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *(
            (lambda values=values: TrialLoad("a", **{"height": 1.0, **values}), f"{words}.*pass")
            for values, words in (
                ({"height": -1.0}, "height is -1.0"),
                ({"height": math.nan}, "height is nan"),
                ({"height": math.inf}, "height is inf"),
                ({"alpha": 0.9}, "alpha is 0.9"),
                ({"beta": 0.5}, "beta is 0.5"),
                ({"beta": math.nan}, "beta is nan"),
            )
        ),
        *(
            (lambda width=width: runtime(TrialLoad("a", 1.0), width), "width is")
            for width in (0, -1, 1.5, Fraction(3, 2), math.nan, math.inf, "1")
        ),
        *(
            (lambda times=times: packing_limit(times, 0.1), words)
            for times, words in (
                ({2: 1.0}, "not 1"),
                ({}, "not 1"),
                ({1: math.nan}, r"times\[1\] is nan"),
                ({1: 1.0, 2: -1.0}, r"times\[2\] is -1.0"),
                ({1: 0.0}, r"times\[1\] is 0.0"),
                ({1: 1.0, 2: []}, r"times\[2\] is \[\]"),
                ({1: 1.0, 2: [1.0, math.inf]}, r"times\[2\]"),
                ({0: 1.0, 1: 1.0}, "key 0"),
            )
        ),
        (lambda: packing_limit({1: 1.0}, math.nan), "threshold is nan"),
    ],
)
def test_what_is_no_load_width_time_or_threshold_is_refused_with_its_value(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@given(st.floats(1, 3), st.floats(-0.5, 0.9), st.integers(1, 8))
def test_packing_limit_is_the_largest_p_before_the_first_that_fails(alpha: float, least: float, most: int) -> None:
    times = {p: alpha ** (p - 1) for p in range(1, most + 1)}
    limit = packing_limit(times, least)

    def pays(p: int) -> bool:
        return 1 - (p - 1) / p * times[p] / times[p - 1] > least

    assert all(pays(p) for p in range(2, limit + 1))
    assert limit == most or not pays(limit + 1)


@given(groups())
def test_lower_bound_is_the_formula(group: Group) -> None:
    loads, n, c, d = group
    widths = [Fraction(1, p) for p in range(2, c + 1)] + list(range(1, min(d, n) + 1))
    times = max((min(runtime(load, w) for w in widths) for load in loads), default=0.0)
    areas = sum(min(float(w) * runtime(load, w) for w in widths) for load in loads) / n
    assert lower_bound(loads, n, c=c, d=d) == pytest.approx(max(times, areas))
