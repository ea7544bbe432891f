"""`benchmarks.serve_cluster --quick`: what the figures must show. The twin gives the same figures each time."""

from __future__ import annotations

import pytest

from benchmarks.serve_cluster import figure_16, zipf

pytestmark = pytest.mark.slow


def test_parts_are_more_even_than_random_ones():
    for row in figure_16(1, True):
        assert row["ours"]["rate"] < 0.1 * row["random"]["rate"]
        assert row["ours"]["memory"] < 0.1 * row["random"]["memory"]


def test_shares_of_the_load() -> None:
    assert zipf(["a", "b"], 1.0) == pytest.approx({"a": 2 / 3, "b": 1 / 3})
