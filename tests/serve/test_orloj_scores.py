"""Equation 4.2: the goldens of the score, and its table against its definition."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.orloj_naive import score
from benchmarks.orloj_profiles import largest
from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.batching.orloj_scores import ScoreTable
from tests.serve.test_orloj_histograms import histograms

#: Golden 3: one bin [10, 20), E[L] = 15.
TIME = Histogram((10.0, 20.0), (1.0,))
RATES = st.floats(-6, 2).map(lambda exponent: 10**exponent)


def by_table(time: Histogram, slack: float, b: float) -> float:
    table = ScoreTable.of(time, b)
    return table.within(table.interval(slack), slack)


@pytest.mark.parametrize(
    "b, slack, wanted",
    [
        (0.1, 40, 0.00570321),
        (0.1, 20, 0.0421414),
        (0.1, 15, 0.0262313),
        (0.1, 10, 0.0),
        (0.1, 5, 0.0),
        (1e-4, 40, 0.0665002),
        (1e-4, 20, 0.0666333),
        (1e-4, 15, 0.0333250),
        (0.1, 1e7, 0.0),
    ],
)
def test_golden_3(b: float, slack: float, wanted: float) -> None:
    assert score(TIME, slack, b) == pytest.approx(wanted, rel=1e-5)
    assert by_table(TIME, slack, b) == pytest.approx(wanted, rel=1e-5)


@given(histograms(), st.floats(-5, 60), RATES, st.integers(1, 16))
@settings(max_examples=50, deadline=None)
def test_the_table_is_the_score(histogram: Histogram, slack: float, b: float, k: int) -> None:
    time = largest(histogram, k)
    assert by_table(time, slack, b) == pytest.approx(score(time, slack, b), rel=1e-6, abs=1e-12)


def test_values_of_single_times_are_steps_of_the_score() -> None:
    """Times of 1 and 3 or 4, and between 1 and 2; at a single time the score has what comes with it."""
    time = Histogram((1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 4.0), (1.0, 1.0, 0.0, 1.0, 0.0, 1.0))
    for slack in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0):
        assert by_table(time, slack, 0.2) == pytest.approx(score(time, slack, 0.2), rel=1e-12)
