"""The two lower bounds, and the pricing of configurations that mixtures need."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.planning import TrialLoad, lower_bound, runtime
from fluidtune.planning.bounds import Modes, relaxed_bound
from fluidtune.planning.mix import Pricer
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


@settings(deadline=None)
@given(groups())
def test_relaxed_bound_is_no_lower_than_the_simple_one(group: Group) -> None:
    loads, n, c, d = group
    assert relaxed_bound(Modes(loads, n, c=c, d=d)) >= lower_bound(loads, n, c=c, d=d)


def test_relaxed_bound_by_hand() -> None:
    # 2 trials, 1 device, no packing, no overhead: 2 h. Four on 4 devices, c = 1: h, whatever the widths.
    assert relaxed_bound(Modes([TrialLoad(x, 1.0) for x in "ab"], 1, c=1, d=4)) == pytest.approx(2)
    assert relaxed_bound(Modes([TrialLoad(x, 1.0) for x in "abcd"], 4, c=1, d=4)) == pytest.approx(1)
    # c = 2, d = 1, alpha = 1.5, 3 trials on 2 devices: time shares x at 1/2 and 1 - x at 1 with
    # x / 1.5 + 1 - x = 1 / T and 3 * (x / 2 + 1 - x) = 2 give x = 2/3 and T = 9/7.
    three = [TrialLoad(x, 1.0, 1.5) for x in "abc"]
    assert relaxed_bound(Modes(three, 2, c=2, d=1)) == pytest.approx(9 / 7, rel=2e-4)


def dearest(modes: Modes, weights: np.ndarray) -> float:
    """The value of the best configuration, found by trying all."""
    best = 0.0
    for choice in product(range(-1, len(modes.sizes)), repeat=len(modes.ids)):
        if _fits([modes.widths[mode] for mode in choice if mode >= 0], modes.n):
            value = sum(weights[i] * modes.gains[i, mode] for i, mode in enumerate(choice) if mode >= 0)
            best = max(best, float(value))
    return best


def _fits(widths: list, n: int) -> bool:
    """Whether trials of these widths fit on n devices together (first fit, largest first)."""
    left = n - sum(int(width) for width in widths)
    rooms = [Fraction(1)] * max(0, left)
    for share in sorted((width for width in widths if width < 1), reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= share]
        if not fitting:
            return False
        rooms[fitting[0]] -= share
    return left >= 0


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(1, 1.9), st.floats(1, 1.4)), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_pricing_is_never_above_and_seldom_below_the_best(rows: list, n: int, c: int, d: int) -> None:
    modes = Modes([TrialLoad(f"t{i}", 1.0, a, b) for i, (_, a, b) in enumerate(rows)], n, c=c, d=d)
    weights = np.array([weight for weight, _, _ in rows])
    value, configuration, gains = Pricer(modes).best(weights)
    best = dearest(modes, weights)
    assert value == pytest.approx(float(weights @ gains), abs=1e-12)
    assert _fits([modes.widths[mode] for mode in configuration if mode >= 0], n)
    # What the order by weight costs is observed, not proven: up to a quarter, and nothing if all trials are alike.
    assert best / 2 <= value <= best + 1e-9
    if len({(alpha, beta) for _, alpha, beta in rows}) == 1:
        assert value == pytest.approx(best)
