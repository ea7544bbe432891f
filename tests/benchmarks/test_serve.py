"""`benchmarks.serve` and `serve_cluster`: no figure beyond a part's tolerance is accepted; `serve_real` counts all."""

from __future__ import annotations

import pytest

from benchmarks import serve, serve_cluster, serve_real
from benchmarks.serve import FIGURE_6A
from benchmarks.serve_cluster import figure_16, zipf
from symphony_serve import seen_times


def sides(goodput, batch, waits, nexus=4249.0, shepherd=5137.0, second=(631.0, 844.0)):
    """What `table_2` finds, with these figures of deferred starts and of baselines.

    second: the goodputs of Nexus and Shepherd on the second workload.
    """
    return {
        "deferred_window": {
            "resnet50": {"goodput": goodput, "median_batch": batch, "median_queueing_ms": waits},
            "inception_resnet_v2": {"goodput": 950.0, "median_batch": 9, "median_queueing_ms": 3.0},
        },
        **{
            side: {
                "resnet50": {"goodput": first, "median_queueing_ms": 6.0},
                "inception_resnet_v2": {"goodput": other, "median_queueing_ms": 6.0},
            }
            for side, first, other in (("nexus", nexus, second[0]), ("shepherd", shepherd, second[1]))
        },
    }


def loads(utilisation, top):
    """What `figure_2` finds with a peak of 100 requests/s."""
    return [
        {"load": 0.3, "utilisation": utilisation, "good": 30, "rate": 30},
        {"load": 1.5, "utilisation": 1.0, "good": top, "rate": 150},
    ]


def timeouts(none, short, longer):
    """What `figure_6b` finds; another time-out is always the best."""
    return {"window": {"0": none, "0.06": 1.0, "0.12": short, "0.18": longer}}


GPUS = {"deferred": 21, "nexus": 27, "clockwork": 24, "shepherd": 22}


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        (
            "table_2",
            sides(5200, 14, 3.0, 4450.0, 4900.0, (600.0, 880.0)),
            [
                sides(5199, 14, 3.0),
                sides(5200, 13, 3.0),
                sides(5200, 14, 3.1),
                sides(5200, 14, 3.0, nexus=4036.0),
                sides(5200, 14, 3.0, nexus=4462.0),
                sides(5200, 14, 3.0, shepherd=4880.0),
                sides(5200, 14, 3.0, second=(599.0, 844.0)),
                sides(5200, 14, 3.0, second=(631.0, 801.0)),
            ],
        ),
        ("figure_2", loads(0.37, 98), [loads(0.39, 98), loads(0.21, 98), loads(0.3, 96)]),
        (
            "figure_6a",
            {name: dict(enumerate(ratios)) for name, ratios in FIGURE_6A.items()},
            [{name: dict(enumerate([*ratios[:3], 0.7])) for name, ratios in FIGURE_6A.items()}],
        ),
        (
            "figure_6b",
            timeouts(0.84, 0.96, 0.95),
            [timeouts(0.84, 0.96, 0.94), timeouts(0.84, 0.94, 0.96), timeouts(0.79, 1, 1)],
        ),
        ("figure_10", GPUS, [{**GPUS, "deferred": 22}]),
        ("figure_13", 7.8, [7.7]),
        (
            "figure_14",
            {"20": {"0": 100, "1": 101, "9": 0}},
            [{"20": {"0": 100, "1": 103, "9": 0}}, {"20": {"0": 100, "1": 50, "9": 100}}],
        ),
    ],
)
def test_each_part_has_a_tolerance(part, good, bad):
    assert serve.ACCEPTS.keys() == serve.PARTS.keys()
    assert serve.ACCEPTS[part](good)
    assert not any(serve.ACCEPTS[part](one) for one in bad)


def slos(tight, loose, bursty):
    """What `figure_11` finds with these goodputs of Nexus; the others have 100, and in bursts 90."""
    row = {"deferred_window": 100, "shepherd": 100, "clockwork": 100}
    return {
        "poisson": {"equal": {"15": {**row, "nexus": tight}, "100": {**row, "nexus": loose}}},
        "gamma_0.05": {"equal": {"100": {"deferred_window": 90, "shepherd": 90, "nexus": bursty}}},
    }


def advice(bad, gpus):
    """What `figure_15` finds where 10 GPUs are needed."""
    return {"calm_bad_rate": bad, "gpus": gpus, "needed": 10.0}


def parts(*uneven):
    """What `figure_16` finds with seeds whose parts are so uneven in rate and memory; random ones by 0.5 in both."""
    return [
        {"ours": {"rate": rate, "memory": memory}, "random": {"rate": 0.5, "memory": 0.5}} for rate, memory in uneven
    ]


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        ("figure_11", slos(60, 85, 40), [slos(110, 85, 40), slos(60, 75, 40), slos(60, 85, 91)]),
        ("figure_15", advice(0.009, 10.9), [advice(0.01, 10.0), advice(0.0, 11.1), advice(0.0, 8.9)]),
        ("figure_16", parts((0.1, 0.1)), [parts((0.1, 0.1), (0.6, 0.1)), parts((0.1, 0.5))]),
    ],
)
def test_each_part_of_the_cluster_has_a_tolerance(part, good, bad):
    assert serve_cluster.ACCEPTS.keys() == serve_cluster.PARTS.keys()
    assert serve_cluster.ACCEPTS[part](good)
    assert not any(serve_cluster.ACCEPTS[part](one) for one in bad)


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
