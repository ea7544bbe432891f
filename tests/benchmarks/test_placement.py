"""AlpaServe's published figures come out of its recorded profile."""

import pytest

from benchmarks.placement import __main__ as placement
from benchmarks.placement import baselines
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
