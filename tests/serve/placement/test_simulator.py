"""Many placements played at once, against one request after the other in plain words."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from symphony_serve.placement.served_models import Cut, Group, ServedModel, Shape
from symphony_serve.placement.simulator import Requests, Simulator

SHAPES = (Shape(1, 1), Shape(1, 2), Shape(2, 1), Shape(1, 4))
#: Whole milliseconds, so that no sum depends on its order.
TIMES = st.integers(1, 40)


def plain(models, groups, requests):
    """By request: whether it was attained, its milliseconds, its group."""
    clocks = [[0] * group.shape.pp for group in groups]
    found = []
    for arrival, number in zip(requests.times, requests.models, strict=True):
        holders = [at for at, group in enumerate(groups) if number in group.models]
        if not holders:
            found.append((False, 0, -1))
            continue
        chosen = min(holders, key=lambda at: (clocks[at][-1], at))
        cut, time, after = models[number].cuts[groups[chosen].shape], arrival, []
        for stage, busy in enumerate(cut.seconds):
            time = max(time, clocks[chosen][stage]) + busy
            after.append(time)
            time += cut.hop if stage < len(cut.seconds) - 1 else 0
        in_time = time - arrival + models[number].delay <= models[number].slo
        if in_time:
            clocks[chosen] = after
        found.append((in_time, time - arrival, chosen))
    return found


@st.composite
def models(draw):
    cuts = {
        shape: Cut(tuple(draw(st.lists(TIMES, min_size=shape.pp, max_size=shape.pp))), 1.0, draw(st.integers(0, 5)))
        for shape in SHAPES
    }
    return ServedModel("m", cuts, draw(st.integers(1, 300)), delay=draw(st.integers(0, 5)))


@given(st.data())
def test_lanes_are_played_as_each_alone(data):
    served = data.draw(st.lists(models(), min_size=1, max_size=4))
    numbers = st.sets(st.integers(0, len(served) - 1)).map(lambda held: tuple(sorted(held)))
    group = st.builds(Group, st.sampled_from(SHAPES), numbers)
    lanes = data.draw(st.lists(st.lists(group, min_size=1, max_size=3), min_size=1, max_size=3))
    gaps = data.draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, len(served) - 1)), max_size=30))
    requests = Requests(np.cumsum([gap for gap, _ in gaps]), np.array([number for _, number in gaps], dtype=int))
    simulator = Simulator(served, requests)
    shapes = simulator.shape_numbers([[one.shape for one in lane] for lane in lanes])
    held = np.zeros((len(served), *shapes.shape), dtype=bool)
    for at, lane in enumerate(lanes):
        for place, one in enumerate(lane):
            held[list(one.models), at, place] = True
    played = simulator.play(shapes, held)
    for at, lane in enumerate(lanes):
        expected = plain(served, lane, requests)
        assert played.attained[:, at].tolist() == [one[0] for one in expected]
        assert played.group[:, at].tolist() == [one[2] for one in expected]
        assert [one for one, ok in zip(played.latency[:, at], played.attained[:, at], strict=True) if ok] == [
            one[1] for one in expected if one[0]
        ]


@pytest.mark.parametrize("stage, hop, mean", [(0.55, 0.0, 1.925), (0.5, 0.1, 1.85)])
def test_figure_1(stage, hop, mean):
    """AlpaServe, figure 1: four requests at once to two stages. The paper prints 1.85, which is with hops."""
    model = ServedModel("a", {Shape(1, 2): Cut((stage, stage), 0.0, hop)}, 100.0)
    simulator = Simulator([model], Requests(np.zeros(4), np.zeros(4, dtype=int)))
    played = simulator.play(*simulator.lane([Group(Shape(1, 2), (0,))]))
    assert played.attained.all() and played.latency.mean() == pytest.approx(mean)


def test_requests_of_some_models_are_numbered_anew():
    some = Requests(np.arange(4.0), np.array([2, 0, 1, 2])).of([2, 1])
    assert some.times.tolist() == [0.0, 2.0, 3.0] and some.models.tolist() == [0, 1, 0]
