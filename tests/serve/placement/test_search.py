"""How layers are cut into stages, how GPUs become groups, and which models stand in which groups."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symphony_serve.errors import ServeError
from symphony_serve.placement import search as search_room
from symphony_serve.placement import selection
from symphony_serve.placement.arrivals import gamma_arrivals, merged
from symphony_serve.placement.search import LeastGpus, Search, groupings, splits_of
from symphony_serve.placement.selection import evaluate, fast_greedy
from symphony_serve.placement.served_models import Cut, Group, ServedModel, Shape, cuts_of_layers
from symphony_serve.placement.simulator import Requests, Simulator
from symphony_serve.placement.stages import cut_layers

ONE, TWO = Shape(1, 1), Shape(1, 2)


def model(name: str, seconds: float, slo: float, size: float = 1.0, weight: float = 1.0) -> ServedModel:
    cuts = {shape: Cut((seconds / shape.pp,) * shape.pp, size / shape.pp) for shape in (ONE, TWO)}
    return ServedModel(name, cuts, slo, weight)


def requests(*rates: float, seconds: float = 60.0, cv: float = 3.0) -> Requests:
    return merged([gamma_arrivals(rate, cv, seconds, seed) for seed, rate in enumerate(rates)])


def run(search: Search):
    steps = list(search.steps())
    assert all(before.score <= after.score for before, after in itertools.pairwise(steps))
    return search.best


def test_a_burst_of_one_model_finds_both_gpus_where_memory_lets_none_have_two():
    """AlpaServe, section 3.1: two models in a pipeline over two GPUs, in place of a GPU each."""
    models, asked = [model("a", 0.4, 2.0), model("b", 0.4, 2.0)], requests(1.0, 1.0, cv=4.0)
    best = run(Search(models, 2, 1.0, asked))
    simulator = Simulator(models, asked)
    apart = evaluate(simulator, [Group(ONE, (0,)), Group(ONE, (1,))])
    assert best.groups == (Group(TWO, (0, 1)),) and best.attainment > apart.attainment
    assert best == evaluate(simulator, best.groups)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(2, 8),
)
def test_what_is_found_fits_and_attains_what_is_said(kinds, gpus, memory):
    models = [model(str(number), seconds / 10, slo / 10, size) for number, (seconds, slo, size) in enumerate(kinds)]
    asked = requests(*[1.0] * len(models), seconds=20.0)
    best = run(Search(models, gpus, memory, asked))
    assert sum(group.shape.gpus for group in best.groups) <= gpus
    for group in best.groups:
        assert sum(models[one].cuts[group.shape].bytes for one in group.models) <= memory
    assert best.attainment == pytest.approx(evaluate(Simulator(models, asked), best.groups).attainment)


def test_the_greedy_serves_who_loses_most_by_weight():
    """Two models of 5 requests/s, and one GPU that holds one of them."""
    for weights, served in (((1.0, 10.0), 1), ((10.0, 1.0), 0), ((1.0, 1.0), 0)):
        models = [model(str(number), 0.2, 0.5, weight=weight) for number, weight in enumerate(weights)]
        asked = Requests(np.arange(20) / 10, np.arange(20) % 2)
        *_, found = fast_greedy(Simulator(models, asked), [[ONE]], 1.0)
        assert found[0].groups == (Group(ONE, (served,)),)


def test_the_beam_betters_the_greedy():
    """The greedy begins with the most asked model, which is too slow for its SLO."""
    hopeless, good = model("a", 2.0, 1.0), model("b", 0.1, 1.0)
    assert run(Search([hopeless, good], 1, 1.0, requests(9.0, 1.0))).groups == (Group(ONE, (1,)),)


def test_groupings_use_all_gpus_where_a_model_stands_on_one():
    assert groupings(7, [ONE, TWO, Shape(1, 4)]) == [
        [ONE] * 7,
        [TWO] * 3 + [ONE],
        [Shape(1, 4), TWO, ONE],
    ]
    assert groupings(3, [TWO]) == [[TWO]]
    assert groupings(1, [TWO]) == []


@settings(deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=5))
def test_splits_use_all_gpus_and_leave_no_bucket_out(gpus, buckets):
    splits = splits_of(gpus, [rate for rate, _ in buckets], [latency for _, latency in buckets])
    assert bool(splits) == (len(buckets) <= gpus) and len(splits) <= search_room.MOST_SPLITS
    assert all(sum(split) == gpus and min(split) >= 1 and len(split) == len(buckets) for split in splits)


def test_buckets_get_gpus_of_their_own():
    """On four GPUs, groups of one shape serve one of the two models only."""
    long = ServedModel("long", {TWO: Cut((1.0, 1.0), 1.0)}, 20.0)
    short = ServedModel("short", {ONE: Cut((0.02,), 1.0)}, 1.0)
    asked = requests(0.3, 10.0)
    search = Search([long, short], 4, 1.0, asked)
    steps = list(search.steps())
    assert sorted(search.best.groups)[0] == Group(ONE, (1,)) and Group(TWO, (0,)) in search.best.groups
    assert search.best == evaluate(Simulator([long, short], asked), search.best.groups)
    assert steps[0].attainment < search.best.attainment == 1.0


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_steps_that_add_several_replicas_fit_as_well(count, gpus, memory):
    models = [model(str(number), 0.3, 0.5, 1.0 + number % 2) for number in range(count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "STEPS", 2)
        steps = list(fast_greedy(Simulator(models, requests(*[3.0] * count, seconds=5.0)), [[ONE] * gpus], memory))
    assert all(sum(models[one].cuts[ONE].bytes for one in group.models) <= memory for group in steps[-1][0].groups)


def test_a_large_search_takes_less_of_each_part(monkeypatch):
    models = [model("long", 2.0, 2.5), model("short", 0.02, 0.03)]
    whole = len(list(Search(models, 4, 1.0, requests(2.0, 60.0)).steps()))
    monkeypatch.setattr(search_room, "MOST_BEAM", 0)
    without_beam = len(list(Search(models, 4, 1.0, requests(2.0, 60.0)).steps()))
    monkeypatch.setattr(search_room, "MOST_CELLS", 0)
    assert len(list(Search(models, 4, 1.0, requests(2.0, 60.0)).steps())) <= without_beam < whole


def test_the_least_gpus_that_suffice():
    models, asked = [model("a", 0.1, 0.3)], requests(45.0, cv=1.0)
    found = LeastGpus(models, 1.0, asked, 0.99)
    steps = list(found.steps())
    assert len(list(LeastGpus(models, 1.0, asked, 0.99, busy=4.5).steps())) < len(steps)
    assert found.best.attainment >= 0.99 and 5 <= found.gpus <= 12
    for fewer in range(1, found.gpus):
        assert run(Search(models, fewer, 1.0, asked, 0.99)).attainment < 0.99


def test_the_least_gpus_may_be_found_by_the_beam():
    """The greedy serves "a", of which one GPU answers a quarter. All of "b" are 40 % by weight."""
    models = [model("a", 0.1, 0.11), model("b", 0.1, 2.0, weight=20 / 3)]
    found = LeastGpus(models, 1.0, requests(30.0, 3.0, cv=1.0), 0.35)
    assert list(found.steps()) and found.gpus == 1
    assert found.best.groups == (Group(ONE, (1,)),)


def test_more_gpus_than_a_plan_may_have(monkeypatch):
    monkeypatch.setattr(search_room, "MOST_GPUS", 4)
    with pytest.raises(ServeError, match=r"4 GPUs attain 0\.\d+, less than 0.99, and no plan is made for more"):
        list(LeastGpus([model("a", 0.5, 0.6)], 1.0, requests(50.0), 0.99).steps())


@pytest.mark.parametrize("rate, cv", [(20.0, 0.0), (20.0, 1.0), (5.0, 4.0)])
def test_arrivals_have_their_rate_and_cv(rate, cv):
    found = gamma_arrivals(rate, cv, 5000.0, 3)
    gaps = np.diff(found)
    # Four standard deviations of the mean of this many gaps.
    assert len(found) / 5000 == pytest.approx(rate, rel=4 * cv / len(found) ** 0.5) and found[-1] < 5000
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1, abs=1e-6) and (gaps >= 0).all()


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
