"""Layers are cut into the stages of which the largest is least."""

import itertools
import math

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


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8), st.data())
def test_no_other_cut_whose_stages_have_room_is_better(layers, data):
    seconds, weights = zip(*layers, strict=True)
    stages, room = data.draw(st.integers(1, len(layers))), data.draw(st.integers(0, 30) | st.just(math.inf))

    def sums(starts, values):
        return [sum(values[first:end]) for first, end in itertools.pairwise((*starts, len(layers)))]

    def order(starts):
        found = sums(starts, seconds)
        return max(found), sum(one**2 for one in found), starts

    cuts = [(0, *inner) for inner in itertools.combinations(range(1, len(layers)), stages - 1)]
    fitting = [order(starts) for starts in cuts if max(sums(starts, weights)) <= room]
    if not fitting:
        with pytest.raises(ServeError, match=r"do not fit into .* stages of .* GiB each; give more"):
            cut_layers(seconds, stages, weights, room)
    else:
        assert order(tuple(part.start for part in cut_layers(seconds, stages, weights, room))) == min(fitting)


def test_more_stages_than_layers():
    with pytest.raises(ServeError, match="2 layers are to be cut into 3 stages; give 1 to 2"):
        cut_layers([1.0, 1.0], 3)


def test_a_model_is_cut_into_as_many_stages_as_it_has_layers_for():
    cuts = cuts_of_layers([0.1, 0.1, 0.2, 0.4, 0.1], [1, 2, 3, 4, 5], hop=0.01)
    assert sorted(cuts) == [(1, 1), (1, 2), (1, 4)]
    assert cuts[Shape(1, 2)].seconds == pytest.approx((0.4, 0.5))
    assert cuts[Shape(1, 2)].bytes == 9 and cuts[Shape(1, 2)].latency == pytest.approx(0.91)
