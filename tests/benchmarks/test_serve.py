"""`benchmarks.serve_cluster` and `serve_real`: its parts are even, and all sides have the same requests."""

from __future__ import annotations

import pytest

from benchmarks import serve_real
from symphony_serve import seen_times


@pytest.mark.slow
def test_all_sides_have_the_same_requests():
    """A smaller network, because it is measured for each run."""
    before = seen_times.QUANTILE
    figures = serve_real.run(["loads", "quantiles"], 0.05, 1, quick=True, width=32, most=4)
    assert figures["kind"] == "real"
    for arrivals in serve_real.SHAPES:
        sides = figures["loads"][arrivals]["1.2"]
        assert sides.keys() == {"deferred_window", "eager_window", "eager_fifo", "serve_batch"}
        for row in sides.values():
            assert row["good"] + row["late"] + row["refused"] == pytest.approx(1.0, abs=1e-3)
    assert figures["quantiles"].keys() == {f"{value:g}" for value in serve_real.QUANTILES}
    assert before == seen_times.QUANTILE
    assert figures["ratios"].keys() == {"eager_window", "eager_fifo", "serve_batch"}
