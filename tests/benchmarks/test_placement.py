"""AlpaServe's published figures come out of its recorded profile."""

import pytest

from benchmarks.placement import __main__ as placement
from benchmarks.placement import baselines
from benchmarks.placement.queueing import mean_latency, most_slowdown, replicated
from benchmarks.placement.recorded import recorded_model
from symphony_serve.placement.served_models import Group, Shape
from symphony_serve.placement.simulator import Simulator
from tests.benchmarks.test_commands import BASE, _run


@pytest.fixture(scope="module")
def requests():
    return placement.drawn(24, 40.0, 4.0, 200.0)


def _simulator(scale, requests):
    return Simulator([recorded_model(str(at), "bert-2.6b", scale) for at in range(24)], requests)


def test_given_placements_of_table_2(requests):
    assert len(requests) == 8129
    assert placement.reported(_simulator(5.0, requests), placement.AT_5) == pytest.approx(0.979, abs=0.001)


ROWS = [(0.1, 1.0128, 1.3993), (0.5, 1.0692, 1.3333), (1.0, 1.1315, 1.2361), (1.8, 1.0493, 1.0499)]


@pytest.mark.parametrize("load, every, largest", ROWS)
def test_the_overhead_that_pays(load, every, largest):
    found = most_slowdown(load)
    assert found == (pytest.approx(every, abs=1e-4), pytest.approx(largest, abs=1e-4))
    # Where it pays no more, both sides wait for as long: latency 1, two models at equal shares.
    every, largest = found
    assert mean_latency(load, every, every / 2) == pytest.approx(replicated(load, 1.0), abs=1e-9)
    assert mean_latency(load, 1.0, largest / 2) == pytest.approx(replicated(load, 1.0), abs=1e-9)


@pytest.mark.slow
def test_rivals(requests):
    simulator = _simulator(5.0, requests)
    sizes = placement.BUDGET
    alone = baselines.selective_replication(simulator, 16, sizes)
    assert placement.reported(simulator, alone) == pytest.approx(0.640, abs=0.005)
    assert {group.shape for group in alone} == {Shape(1, 1)} and all(len(group.models) == 2 for group in alone)
    assert baselines.uniform(simulator, 3, sizes)[2] == Group(Shape(1, 1), (2, 3))
    turns = baselines.round_robin(simulator, 8, sizes)
    assert turns == (Group(Shape(1, 4), tuple(range(0, 18, 2))), Group(Shape(1, 4), tuple(range(1, 18, 2))))


@pytest.mark.slow
def test_the_command():
    keys = BASE | {"table2", "queueing"}
    figures = _run("benchmarks.placement", "--only", "table2", "queueing", keys=keys, kind="twin")
    assert figures["table2"]["scales"]["5"]["search"] >= figures["table2"]["scales"]["5"]["sr"]
    assert figures["queueing"]["analysis"]["pipeline"] == pytest.approx(0.55)
