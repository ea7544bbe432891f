"""Layers are cut into the stages of which the largest is least."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symphony_serve.errors import ServeError
from symphony_serve.placement.served_models import Shape, cuts_of_layers
from symphony_serve.placement.stages import cut_layers


def test_the_specification_s_example():
    layers = [4, 1, 1, 1, 1, 4]
    assert [sum(layers[at] for at in part) for part in cut_layers(layers, 2)] == [6, 6]
    assert cut_layers(layers, 3) == [range(0, 1), range(1, 5), range(5, 6)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_no_other_cut_is_better(layers, data):
    stages = data.draw(st.integers(1, len(layers)))

    def order(starts):
        sums = [sum(layers[first:end]) for first, end in itertools.pairwise((*starts, len(layers)))]
        return max(sums), sum(one**2 for one in sums), starts

    best = min(order((0, *inner)) for inner in itertools.combinations(range(1, len(layers)), stages - 1))
    assert order(tuple(part.start for part in cut_layers(layers, stages))) == best


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=7), st.data())
def test_no_stage_has_more_weights_than_there_is_room_for(layers, data):
    seconds, weights = zip(*layers, strict=True)
    stages, room = data.draw(st.integers(1, len(layers))), data.draw(st.integers(0, 30))
    fitting = []
    for inner in itertools.combinations(range(1, len(layers)), stages - 1):
        parts = list(itertools.pairwise((0, *inner, len(layers))))
        if all(sum(weights[first:end]) <= room for first, end in parts):
            fitting.append(max(sum(seconds[first:end]) for first, end in parts))
    if not fitting:
        with pytest.raises(ServeError, match=r"do not fit into .* stages of .* GiB each; give more"):
            cut_layers(seconds, stages, weights, room)
    else:
        cut = cut_layers(seconds, stages, weights, room)
        assert max(sum(seconds[part.start : part.stop]) for part in cut) == min(fitting)
        assert max(sum(weights[part.start : part.stop]) for part in cut) <= room


def test_more_stages_than_layers():
    with pytest.raises(ServeError, match="2 layers are to be cut into 3 stages; give 1 to 2"):
        cut_layers([1.0, 1.0], 3)


def test_a_model_is_cut_into_as_many_stages_as_it_has_layers_for():
    cuts = cuts_of_layers([0.1, 0.1, 0.2, 0.4, 0.1], [1, 2, 3, 4, 5], hop=0.01)
    assert sorted(cuts) == [(1, 1), (1, 2), (1, 4)]
    assert cuts[Shape(1, 2)].seconds == pytest.approx((0.4, 0.5))
    assert cuts[Shape(1, 2)].bytes == 9 and cuts[Shape(1, 2)].latency == pytest.approx(0.91)
