"""`benchmarks.serve`: every part has a tolerance, and a figure beyond it is not accepted."""

from __future__ import annotations

import pytest

from benchmarks.serve import ACCEPTS, FIGURE_6A, PARTS


def sides(goodput, batch, waits):
    """What `table_2` finds, with these figures of deferred starts on the first workload."""
    found = {"goodput": 950.0, "median_batch": 9, "median_queueing_ms": 3.0}
    ours = {"goodput": goodput, "median_batch": batch, "median_queueing_ms": waits}
    nexus = {name: {"median_queueing_ms": 6.0} for name in ("resnet50", "inception_resnet_v2")}
    return {"deferred_window": {"resnet50": ours, "inception_resnet_v2": found}, "nexus": nexus}


def loads(utilisation, top):
    """What `figure_2` finds with a peak of 100 requests/s."""
    return [
        {"load": 0.3, "utilisation": utilisation, "good": 30, "rate": 30},
        {"load": 1.5, "utilisation": 1.0, "good": top, "rate": 150},
    ]


GPUS = {"deferred": 21, "nexus": 27, "clockwork": 24, "shepherd": 22}


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        ("table_2", sides(5200, 14, 3.0), [sides(5199, 14, 3.0), sides(5200, 13, 3.0), sides(5200, 14, 3.1)]),
        ("figure_2", loads(0.37, 98), [loads(0.39, 98), loads(0.21, 98), loads(0.3, 96)]),
        (
            "figure_6a",
            {name: dict(enumerate(ratios)) for name, ratios in FIGURE_6A.items()},
            [{name: dict(enumerate([*ratios[:3], 0.7])) for name, ratios in FIGURE_6A.items()}],
        ),
        ("figure_6b", {"window": {"0": 0.84, "0.12": 0.96}}, [{"window": {"0": 0.84, "0.12": 0.94}}]),
        ("figure_10", GPUS, [{**GPUS, "deferred": 22}]),
        ("figure_13", 7.8, [7.7]),
        ("figure_14", {"20": {"0": 3, "1": 3, "9": 0}}, [{"20": {"0": 3, "1": 4, "9": 0}}]),
    ],
)
def test_each_part_has_a_tolerance(part, good, bad):
    assert ACCEPTS.keys() == PARTS.keys()
    assert ACCEPTS[part](good)
    assert not any(ACCEPTS[part](one) for one in bad)
