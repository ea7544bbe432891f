"""Whether trials train as one is decided from measured seconds, and does not go to and fro."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidtune.elastic.fused.worth import BEGIN, LEAST, STAY, Measured, pays

seconds = st.floats(1e-6, 1e3)


def measured(gain: float) -> Measured:
    return Measured([1.0] * LEAST, [gain] * LEAST)


@pytest.mark.parametrize(
    ("gain", "begins", "stays"), [(0.9, False, False), (1.0, False, False), (1.1, False, True), (1.2, True, True)]
)
def test_it_begins_with_a_clear_gain_and_ends_with_a_loss(gain: float, begins: bool, stays: bool) -> None:
    assert (pays(measured(gain), False), pays(measured(gain), True)) == (begins, stays)


@pytest.mark.parametrize("now", [False, True])
def test_nothing_changes_before_both_were_measured(now: bool) -> None:
    for fused, alone in ([[1.0] * LEAST, [9.0] * (LEAST - 1)], [[9.0] * (LEAST - 1), [1.0] * LEAST], [[], []]):
        assert pays(Measured(fused, alone), now) is now


def test_one_interrupted_iteration_decides_nothing() -> None:
    assert pays(Measured([1.0, 1.0, 100.0], [2.0, 2.0, 2.0]), False)
    assert pays(Measured([1.0, 1.0, 100.0], [2.0, 2.0, 2.0]), True)


@given(st.lists(seconds, min_size=LEAST), st.lists(seconds, min_size=LEAST))
def test_what_begins_stays_under_the_same_figures(fused: list[float], alone: list[float]) -> None:
    figures = Measured(fused, alone)
    assert STAY < BEGIN
    if pays(figures, False):
        assert pays(figures, True)
    if not pays(figures, True):
        assert not pays(figures, False)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"was measured: give positive seconds"):
        pays(Measured([wrong], [1.0]), False)
