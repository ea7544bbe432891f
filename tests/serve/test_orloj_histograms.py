"""Distributions of times, and the largest of k."""

import itertools
import math
import random
import re

import pytest
from hypothesis import strategies as st

from benchmarks.orloj_product import largest_of_each
from symphony_serve.batching.orloj_histograms import (
    Histogram,
    Largest,
    common_edges,
    largest,
    mixture,
)


def histograms(bins: int = 6) -> st.SearchStrategy[Histogram]:
    widths = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=bins)
    return widths.flatmap(
        lambda given: st.builds(
            lambda start, masses: Histogram(tuple(itertools.accumulate(given, initial=start)), tuple(masses)),
            st.floats(0.0, 10.0),
            st.lists(st.floats(0.0, 1.0), min_size=len(given), max_size=len(given)).filter(lambda all: sum(all) > 0.01),
        )
    )


TEN, FIVE_OR_FIFTEEN = Histogram.point(10.0), mixture([Histogram.point(5.0), Histogram.point(15.0)])


@pytest.mark.parametrize(
    "found, masses, mean",
    [
        (largest(mixture([TEN, FIVE_OR_FIFTEEN]), 2), [1 / 16, 8 / 16, 7 / 16], 11.875),
        (largest_of_each([TEN, FIVE_OR_FIFTEEN]), [0, 1 / 2, 1 / 2], 12.5),
    ],
    ids=["random places", "one of each"],
)
def test_golden_1(found: Largest, masses: list[float], mean: float) -> None:
    """A is always 10, B is 5 or 15: L of two is 5, 10 or 15."""
    histogram = found.histogram
    near = [histogram.cdf(value + 0.1) - histogram.cdf(value - 0.1) for value in (5, 10, 15)]
    assert near == pytest.approx(masses, abs=1e-12)
    assert found.mean == pytest.approx(mean, rel=1e-15)


def test_golden_2_the_mean_is_not_that_of_the_middles_of_bins() -> None:
    found = largest(Histogram((0.0, 5.0, 10.0), (1.0, 1.0)), 2)
    assert found.histogram.masses == (0.25, 0.75)
    assert found.mean == pytest.approx(20 / 3, rel=1e-12)
    assert found.histogram.mean == pytest.approx(6.25)


def cdf_by_subsets(batch: list[Histogram], time: float) -> float:
    """The integral of equation 4.8, as it is printed: its terms k F**(k-1) f are the derivatives of F**k."""
    k = len(batch)
    return math.fsum(
        (-1) ** (k - size) * size**k / math.factorial(k) * (sum(one.cdf(time) for one in subset) / size) ** k
        for size in range(1, k + 1)
        for subset in itertools.combinations(batch, size)
    )


def test_golden_7_the_signed_sum_over_subsets_is_the_product() -> None:
    rng = random.Random(7)
    for _ in range(20):
        batch = [
            Histogram(tuple(sorted(rng.uniform(1, 9) for _ in range(5))), tuple(rng.random() for _ in range(4)))
            for _ in range(3)
        ]
        found = largest_of_each(batch).histogram
        for edge, below in zip(found.edges, found.below, strict=True):
            assert below == pytest.approx(cdf_by_subsets(batch, edge), abs=1e-12)


def test_samples_fill_bins_of_equal_width_and_empty_ones_are_merged() -> None:
    histogram = Histogram.of_samples([10, 11, 12, 19, 30], common_edges([10, 30], bins=10))
    assert histogram.edges == (10, 12, 14, 18, 20, 28, 30)
    assert histogram.masses == pytest.approx((2 / 5, 1 / 5, 0, 1 / 5, 0, 1 / 5))
    rng = random.Random(1)
    assert len(Histogram.of_samples(rng.uniform(1, 2) for _ in range(5000)).masses) == 20


def test_one_value_is_exact() -> None:
    """So a batch that takes exactly the slack is in time."""
    for histogram in (Histogram.point(75.0), Histogram.of_samples([75.0, 75.0])):
        assert histogram == Histogram((75.0, 75.0), (1.0,))
        assert histogram.mean == largest(histogram, 16).mean == 75.0
        assert (histogram.cdf_before(75.0), histogram.cdf(75.0)) == (0.0, 1.0)


@pytest.mark.parametrize(
    "edges, masses, named",
    [
        ((1.0, 2.0), (0.5, 0.5), "2 edges for 2 masses"),
        ((1.0,), (), "1 edges for 0 masses"),
        ((2.0, 1.0), (1.0,), "edge 1.0 of a histogram follows 2.0"),
        ((-1.0, 1.0), (1.0,), "edge -1.0"),
        ((1.0, math.inf), (1.0,), "edge inf"),
        ((1.0, 2.0), (math.nan,), "mass nan"),
        ((1.0, 2.0), (-1.0,), "mass -1.0"),
        ((1.0, 2.0), (0.0,), "all masses of a histogram are 0"),
    ],
)
def test_a_histogram_that_is_none_is_refused(edges: tuple, masses: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        Histogram(edges, masses)


@pytest.mark.parametrize("samples, named", [([], "no sample"), ([1.0, 0.0], "sample 0.0"), ([math.nan], "sample nan")])
def test_samples_that_are_no_times_are_refused(samples: list, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Histogram.of_samples(samples)
