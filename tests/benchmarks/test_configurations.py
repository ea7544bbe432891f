"""USHER's plan: needs, who is grouped with whom, replicas on GPUs, and the figures of its paper."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement import configurations as made
from benchmarks.placement.bin_classes import FULL, BinClass, Replicas, entries, place
from benchmarks.placement.configurations import NeedyModel, pairs_in_rounds, plan_needs
from benchmarks.placement.model_groups import groups, pair_up
from benchmarks.placement.needs import Kernel, Need, interpolated, need_of_kernels, whole
from benchmarks.usher import drawn
from symphony_serve.errors import ServeError

#: ms to s, MB, percent. Source: the estimator's example of ../spec/usher.md.
GRAPH = [
    Kernel("i0", 5e-6, 10, 0.10),
    Kernel("a1", 10e-6, 30, 0.40, ("i0",)),
    Kernel("b1", 10.5e-6, 20, 0.30, ("i0",)),
    Kernel("a2", 20e-6, 25, 0.60, ("a1",)),
    Kernel("b2", 10e-6, 15, 0.25, ("b1",)),
    Kernel("c1", 4e-6, 40, 0.20, ("a2", "b2")),
]


def test_the_need_of_a_graph_by_hand():
    found = need_of_kernels(8, 0.0, GRAPH, 100)
    assert (found.compute, found.memory) == pytest.approx((0.90, 0.50)) and found.seconds == pytest.approx(39e-6)
    assert need_of_kernels(8, 30.0, GRAPH, 100).memory == pytest.approx(0.80)
    with pytest.raises(ServeError, match="kernel a1 reads i0, which does not stand before it"):
        need_of_kernels(8, 0.0, GRAPH[1:], 100)
    with pytest.raises(ServeError, match="two kernels are named i0"):
        need_of_kernels(8, 0.0, [GRAPH[0], GRAPH[0]], 100)


def test_a_chain_needs_what_its_largest_kernel_needs():
    chain = [Kernel(str(at), 0.1, 10.0 * at, 0.1 * at, (str(at - 1),) if at else ()) for at in range(5)]
    assert need_of_kernels(1, 0.0, chain, 100)[1:4] == pytest.approx((0.4, 0.4, 0.5))


def test_between_two_needs():
    """C = c b / (b + h) with c = .8 and h = 8; memory and seconds are linear."""
    known = [Need(8, 0.4, 0.2, 0.04, 0.1), Need(56, 0.7, 0.68, 0.136, 0.34)]
    found = {one.batch: one for one in interpolated(reversed(known))}
    assert list(found) == [8, 16, 32, 56] and found[56] == known[1]
    assert found[16] == pytest.approx((16, 0.8 * 16 / 24, 0.28, 0.056, 0.14))
    assert interpolated(known[:1]) == (known[0],)


@pytest.mark.parametrize(
    "needs, said",
    [
        ([Need(8, 1.2, 0.1, 1)], "it needs compute 1.2 at batch 8, expected a part of a GPU, 0 to 1"),
        ([Need(8, 0.5, 0.0, 1)], "it needs memory 0 at batch 8"),
        ([Need(8, 0.5, 0.5, 1, 2.0)], "it needs bandwidth 2 at batch 8"),
        ([Need(8, 0.5, 0.5, 1), Need(8, 0.5, 0.5, 2)], "there are two needs at batch 8; give one"),
        ([Need(8, 0.5, 0.5, 2), Need(16, 0.5, 0.5, 1)], "a batch of 16 takes 1 s and one of 8 2 s"),
    ],
)
def test_needs_that_cannot_be(needs, said):
    with pytest.raises(ServeError, match=said):
        interpolated(needs)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=7))
def test_no_pairing_suits_better(leans):
    pairs = pair_up(leans)
    assert sorted(at for pair in pairs for at in pair) == list(range(len(leans)))
    padded = [*leans, 0.0] if len(leans) % 2 else leans

    def least(left):
        if not left:
            return 0.0
        first, *rest = left
        return min(abs(padded[first] + padded[at]) + least([other for other in rest if other != at]) for at in rest)

    assert sum(abs(sum(leans[at] for at in pair)) for pair in pairs) == pytest.approx(least(list(range(len(padded)))))


def test_groups_of_figure_7():
    """Leans .3, .3, -.2, -.2: each pair has one of both. Groups have four models at most."""
    leans = (0.3, 0.3, -0.2, -0.2)
    assert sorted(map(sorted, pair_up(leans))) in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])
    found = groups([[Need(8, 0.5 + lean, 0.5, 1.0)] for lean in (*leans, *leans)])
    assert sorted(map(len, found)) == [4, 4] and all(sum(at % 4 < 2 for at in group) == 2 for group in found)


def gpus_of(sizes):
    """GPUs for single replicas that need these parts of compute and memory."""
    bins: Counter[BinClass] = Counter()
    opened = place(bins, [Replicas.of(at, 1, Need(8, *size, 1.0)) for at, size in enumerate(sizes)])
    assert opened == bins.total()
    return sorted((FULL - held.compute) // 10_000 for held in bins.elements())


def test_figure_3():
    """One replica each: 3 GPUs. M1 halved: 3 still. All halved: 2 full ones."""
    models = {"a": (0.70, 0.10), "b": (0.65, 0.05), "c": (0.40, 0.10)}

    def halved(name):
        memory, weights = models[name]
        return weights + (memory - weights) / 2

    assert [round(halved(name), 3) for name in "abc"] == [0.40, 0.35, 0.25]

    def opened(memories):
        bins: Counter[BinClass] = Counter()
        return place(bins, [Replicas(at, n, 10, whole(m), 0, "memory") for at, (m, n) in enumerate(memories)])

    assert opened([(0.70, 1), (0.65, 1), (0.40, 1)]) == 3
    assert opened([(0.40, 2), (0.65, 1), (0.40, 1)]) == 3
    assert opened([(halved(name), 2) for name in "abc"]) == 2


def test_figure_7():
    """By kind 2 GPUs at compute 90 %; the compute-heavy ones together, 3."""
    sizes = [(0.5, 0.2), (0.5, 0.2), (0.4, 0.6), (0.4, 0.6)]
    assert gpus_of(sizes) == [90, 90]
    order = entries(Replicas.of(at, 1, Need(8, *size, 1.0)) for at, size in enumerate(sizes))
    assert [[one.heavy for one in pair] for pair in order] == [["compute", "memory"]] * 2
    # Without kinds, the two compute-heavy ones first.
    together: Counter[BinClass] = Counter()
    for at, size in enumerate(sizes):
        place(together, [Replicas.of(at, 1, Need(8, *size, 1.0))])
    assert together.total() == 3


@given(st.integers(0, 9))
def test_every_two_meet_once(count):
    met = [pair for pair in pairs_in_rounds(count) if len(pair) == 2]
    assert sorted(met) == sorted(itertools.combinations(range(count), 2))


@st.composite
def needy(draw):
    models = []
    parts = st.integers(1, 100).map(lambda percent: percent / 100)
    for number in range(draw(st.integers(1, 6))):
        known = [Need(4, draw(parts), draw(parts), 0.05, draw(parts) / 2)]
        if draw(st.booleans()):
            compute, memory = (draw(st.integers(round(100 * part), 100)) / 100 for part in known[0][1:3])
            known.append(Need(64, compute, memory, draw(st.sampled_from([0.1, 0.2])), known[0].bandwidth))
        slo = draw(st.sampled_from([0.1, 0.2, 1.0]))
        models.append(NeedyModel(str(number), draw(st.integers(1, 2000)), slo, interpolated(known)))
    return models


def check(models, plan):
    for number, (model, chosen) in enumerate(zip(models, plan.chosen, strict=True)):
        assert chosen.need in model.needs and 2 * chosen.need.seconds <= model.slo
        assert chosen.replicas * chosen.need.capacity >= model.rate * plan.part * (1 - 1e-6)
        assert sum(number in gpu for gpu in plan.gpus) == chosen.replicas
    for gpu in plan.gpus:
        assert gpu and len(set(gpu)) == len(gpu)
        for key in ("compute", "memory", "bandwidth"):
            assert sum(getattr(plan.chosen[number].need, key) for number in gpu) <= 1 + 1e-6
    assert plan.least <= len(plan.gpus)


@settings(max_examples=60, deadline=None)
@given(needy(), st.integers(1, 40))
def test_every_plan_keeps_the_rules(models, gpus):
    plan = plan_needs(models, None, 1.0)
    check(models, plan)
    try:
        fewer = plan_needs(models, gpus, 1.0)
    except ServeError as error:
        assert "do not suffice" in str(error)
        return
    check(models, fewer)
    assert len(fewer.gpus) <= gpus and (fewer.part == 1.0 or len(plan.gpus) > gpus)


def test_splitting_a_load_saves_a_gpu():
    """A batch of 32 needs 90 % of the compute, two of 8 at 45 % stand beside two memory-heavy replicas."""
    split = NeedyModel("a", 150, 1.0, (Need(8, 0.45, 0.1, 0.1), Need(32, 0.9, 0.4, 0.2)))
    beside = NeedyModel("b", 20, 1.0, (Need(8, 0.3, 0.8, 0.5),))
    plan = plan_needs([split, beside], None, 1.0)
    assert plan.gpus == ((0, 1), (0, 1)) and plan.chosen[0] == (2, split.needs[0])


def test_the_combination_that_opens_the_fewest_gpus_is_taken():
    """Three small replicas of a model use less than two large ones, but stand on three GPUs."""
    model = NeedyModel("a", 150, 1.0, (Need(8, 0.34, 0.34, 0.16), Need(32, 0.9, 0.9, 0.4)))
    assert plan_needs([model], None, 1.0).gpus == ((0,), (0,))


def test_placing_models_anew_never_costs_a_gpu(monkeypatch):
    """And it saves one in a quarter of these draws at least."""
    saved = 0
    for seed in range(12):
        models = drawn(12, 12, seed)
        monkeypatch.setattr(made, "ENOUGH_PLACEMENTS", 2000)
        found = len(plan_needs(models, None, 1.0).gpus)
        monkeypatch.setattr(made, "ENOUGH_PLACEMENTS", 0)
        saved += (once := len(plan_needs(models, None, 1.0).gpus)) > found
        assert found <= once
    assert saved >= 3, saved


def test_bins_are_counted_by_content():
    """6,000 GPUs cost as many placements as 6, and a plan of 20 models ends."""
    needs = (Need(8, 0.3, 0.2, 0.1), Need(32, 0.5, 0.45, 0.3))
    few, many = (
        plan_needs([NeedyModel(str(at), rate * (at + 1), 1.0, needs) for at in range(20)], None, 1.0)
        for rate in (10, 5000)
    )
    assert len(many.gpus) > 300 * len(few.gpus) / 2 and many.placements <= made.ENOUGH_PLACEMENTS + 200


def test_an_slo_that_no_batch_allows():
    with pytest.raises(ServeError, match=r"model a has an SLO of 0.1 s, but .* that takes 0.2 s at batch 8"):
        plan_needs([NeedyModel("a", 1, 0.1, (Need(8, 0.5, 0.5, 0.1),))], None, 1.0)
    with pytest.raises(ServeError, match="1 GPUs do not suffice for a hundredth of the rates"):
        plan_needs([NeedyModel("a", 1e6, 1.0, (Need(8, 0.5, 0.5, 0.1),))], 1, 1.0)
