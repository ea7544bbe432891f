"""`benchmarks.serve_cluster --quick`: what the figures must show. The twin gives the same figures each time."""

from __future__ import annotations

import pytest

from benchmarks.serve_cluster import figure_11, figure_15, figure_16, zipf

pytestmark = pytest.mark.slow


def test_bursts_are_worst_for_a_plan():
    rows = figure_11(1, True)
    for shares in ("equal", "zipf_0.9"):
        row = rows["gamma_0.05"][shares]["25"]
        assert row["deferred_window"] > 2 * row["nexus"]


def test_the_advice_follows_the_load():
    figures = figure_15(1, True)
    assert figures["calm_bad_rate"] < 0.01
    assert figures["needed"] < figures["gpus"] < 2 * figures["needed"]


def test_parts_are_more_even_than_random_ones():
    for row in figure_16(1, True):
        assert row["ours"]["rate"] < 0.1 * row["random"]["rate"]
        assert row["ours"]["memory"] < 0.1 * row["random"]["memory"]


def test_shares_of_the_load() -> None:
    assert zipf(["a", "b"], 1.0) == pytest.approx({"a": 2 / 3, "b": 1 / 3})
