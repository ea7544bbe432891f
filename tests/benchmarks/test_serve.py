"""`benchmarks.serve` and `serve_cluster`: no figure beyond a part's tolerance is accepted; `serve_real` counts all."""

from __future__ import annotations

import pytest

from benchmarks import serve, serve_cluster, serve_real
from benchmarks.serve_cluster import figure_16, zipf
from symphony_serve import seen_times

GPUS = {"deferred": 21, "nexus": 27, "clockwork": 24, "shepherd": 22}
ADVICE = {"calm_bad_rate": 0.009, "gpus": 10.9, "needed": 10.0}


@pytest.mark.parametrize(
    ("command", "part", "good", "bad"),
    [
        (serve, "figure_10", GPUS, [{**GPUS, "deferred": 22}]),
        (serve, "figure_13", 7.8, [7.7]),
        (serve_cluster, "figure_15", ADVICE, [ADVICE | {"calm_bad_rate": 0.01}, ADVICE | {"gpus": 11.1}]),
    ],
)
def test_each_part_has_a_tolerance(command, part, good, bad):
    assert command.ACCEPTS.keys() == command.PARTS.keys()
    assert command.ACCEPTS[part](good)
    assert not any(command.ACCEPTS[part](one) for one in bad)


@pytest.mark.slow
def test_parts_are_more_even_than_random_ones():
    for row in figure_16(1, True):
        assert row["ours"]["rate"] < 0.1 * row["random"]["rate"]
        assert row["ours"]["memory"] < 0.1 * row["random"]["memory"]


def test_shares_of_the_load() -> None:
    assert zipf(["a", "b"], 1.0) == pytest.approx({"a": 2 / 3, "b": 1 / 3})


@pytest.mark.slow
def test_all_sides_have_the_same_requests(monkeypatch):
    """A smaller network, because it is measured for each run."""
    monkeypatch.setattr(serve_real, "WIDTH", 32)
    monkeypatch.setattr(serve_real, "MAX_BATCH", 4)
    before = seen_times.QUANTILE
    figures = serve_real.run(["loads", "quantiles"], 0.05, 1, quick=True)
    assert figures["kind"] == "real"
    for arrivals in serve_real.SHAPES:
        sides = figures["loads"][arrivals]["1.2"]
        assert sides.keys() == {"deferred_window", "eager_window", "eager_fifo", "serve_batch"}
        for row in sides.values():
            assert row["good"] + row["late"] + row["refused"] == pytest.approx(1.0, abs=1e-3)
    assert figures["quantiles"].keys() == {f"{value:g}" for value in serve_real.QUANTILES}
    assert before == seen_times.QUANTILE
    assert figures["ratios"].keys() == {"eager_window", "eager_fifo", "serve_batch"}
