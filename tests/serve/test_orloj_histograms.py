"""Distributions of times, and the largest of k."""

import itertools
import random

import pytest
from hypothesis import strategies as st

from benchmarks.orloj_product import largest_of_each
from benchmarks.orloj_profiles import cdf, cdf_before, largest, mixture, point
from symphony_serve.batching.orloj_histograms import Histogram


def histograms(bins: int = 6) -> st.SearchStrategy[Histogram]:
    widths = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=bins)
    return widths.flatmap(
        lambda given: st.builds(
            lambda start, masses: Histogram(tuple(itertools.accumulate(given, initial=start)), tuple(masses)),
            st.floats(0.0, 10.0),
            st.lists(st.floats(0.0, 1.0), min_size=len(given), max_size=len(given)).filter(lambda all: sum(all) > 0.01),
        )
    )


TEN, FIVE_OR_FIFTEEN = point(10.0), mixture([point(5.0), point(15.0)])


@pytest.mark.parametrize(
    "found, masses, mean",
    [
        (largest(mixture([TEN, FIVE_OR_FIFTEEN]), 2), [1 / 16, 8 / 16, 7 / 16], 11.875),
        (largest_of_each([TEN, FIVE_OR_FIFTEEN]), [0, 1 / 2, 1 / 2], 12.5),
    ],
    ids=["random places", "one of each"],
)
def test_golden_1(found: Histogram, masses: list[float], mean: float) -> None:
    """A is always 10, B is 5 or 15: L of two is 5, 10 or 15."""
    near = [cdf(found, value + 0.1) - cdf(found, value - 0.1) for value in (5, 10, 15)]
    assert near == pytest.approx(masses, abs=1e-12)
    assert found.mean == pytest.approx(mean, rel=1e-15)


def test_golden_2_the_mean_is_not_that_of_the_middles_of_bins() -> None:
    found = largest(Histogram((0.0, 5.0, 10.0), (1.0, 1.0)), 2)
    assert found.masses == (0.25, 0.75)
    assert found.mean == pytest.approx(20 / 3, rel=1e-12)
    assert Histogram(found.edges, found.masses).mean == pytest.approx(6.25)


def test_samples_fill_bins_of_equal_width_and_empty_ones_are_merged() -> None:
    histogram = Histogram.of_samples([10, 11, 12, 19, 30])
    assert histogram.edges == (10, 11, 12, 13, 19, 20, 29, 30)
    assert histogram.masses == pytest.approx((1 / 5, 1 / 5, 1 / 5, 0, 1 / 5, 0, 1 / 5))
    rng = random.Random(1)
    assert len(Histogram.of_samples(rng.uniform(1, 2) for _ in range(5000)).masses) == 20


def test_one_value_is_exact() -> None:
    """So a batch that takes exactly the slack is in time."""
    for histogram in (point(75.0), Histogram.of_samples([75.0, 75.0])):
        assert histogram == Histogram((75.0, 75.0), (1.0,))
        assert histogram.mean == largest(histogram, 16).mean == 75.0
        assert (cdf_before(histogram, 75.0), cdf(histogram, 75.0)) == (0.0, 1.0)
