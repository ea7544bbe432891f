"""Equation 4.2: the goldens of the score, and its table against its definition."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symphony_serve.batching.orloj_histograms import Histogram, Largest, largest
from symphony_serve.batching.orloj_scores import Cost, ScoreTable, check_rate, score
from tests.serve.test_orloj_histograms import histograms

#: Golden 3: one bin [10, 20), E[L] = 15.
TIME = Largest(Histogram((10.0, 20.0), (1.0,)), 15.0)


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
    ],
)
def test_golden_3_score(b: float, slack: float, wanted: float) -> None:
    assert score(TIME, slack, b) == pytest.approx(wanted, rel=1e-5)
    assert ScoreTable.of(TIME, b).at(slack) == pytest.approx(wanted, rel=1e-5)


def test_golden_3_both_rows_meet_at_an_edge() -> None:
    for b in (0.1, 1e-4):
        assert score(TIME, 20.0, b) == pytest.approx(score(TIME, 20.0 - 1e-9, b), rel=1e-8)


@given(
    histograms(),
    st.floats(-5, 60),
    st.floats(-6, 2).map(lambda exponent: 10**exponent),
    st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 3)), max_size=2),
    st.integers(1, 16),
)
@settings(max_examples=50, deadline=None)
def test_the_table_is_the_score(histogram: Histogram, slack: float, b: float, later: list, k: int) -> None:
    steps, after, total = [(0.0, 1.0)], 0.0, 1.0
    for seconds, more in later:
        after, total = after + seconds, total + more
        steps.append((after, total))
    cost, time = Cost(tuple(steps)), largest(histogram, k)
    wanted = score(time, slack, b, cost)
    assert ScoreTable.of(time, b, cost).at(slack) == pytest.approx(wanted, rel=1e-6, abs=1e-12)


def test_the_score_is_what_a_simulation_of_its_definition_saves() -> None:
    rng = random.Random(3)
    histogram, b, slack = Histogram((1.0, 4.0, 5.0, 9.0), (0.3, 0.0, 0.7)), 0.2, 7.0
    saved, draws = 0, 200_000
    for _ in range(draws):
        time = rng.uniform(1, 4) if rng.random() < 0.3 else rng.uniform(5, 9)
        saved += time <= slack < time + rng.expovariate(b)
    wanted = score(Largest(histogram, histogram.mean), slack, b) * histogram.mean
    assert saved / draws == pytest.approx(wanted, abs=4 * math.sqrt(0.25 / draws))


@given(histograms(), st.floats(-6, 2).map(lambda exponent: 10**exponent))
@settings(max_examples=20, deadline=None)
def test_within_an_interval_the_score_goes_one_way(histogram: Histogram, b: float) -> None:
    table = ScoreTable.of(largest(histogram, 4), b)
    ends = [*table.edges, table.edges[-1] + 50]
    for i, falls in enumerate(table.falls):
        values = [table.within(i, ends[i] + (ends[i + 1] - ends[i]) * part / 10) for part in range(11)]
        slack = 1e-9 * max(values)
        for before, after in itertools.pairwise(values):
            assert after <= before + slack if falls else after >= before - slack


def test_nothing_overflows_at_large_times() -> None:
    table = ScoreTable.of(TIME, 0.1)
    assert table.at(1e7) == 0.0
    assert ScoreTable.of(TIME, 1e-4).at(1e7) == 0.0


@pytest.mark.parametrize("b", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_that_is_none_is_refused(b: float) -> None:
    with pytest.raises(ValueError, match=f"b = {b}"):
        check_rate(b)


@pytest.mark.parametrize(
    "steps", [(), ((1.0, 1.0),), ((0.0, 0.0),), ((0.0, 1.0), (0.0, 2.0)), ((0.0, 2.0), (1.0, 1.0)), ((0.0, math.nan),)]
)
def test_a_cost_that_does_not_rise_is_refused(steps: tuple) -> None:
    with pytest.raises(ValueError, match="of a cost"):
        Cost(steps)
