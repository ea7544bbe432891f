"""USHER's plan: needs, who is grouped with whom, replicas on GPUs, and the figures of its paper."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement.bin_classes import FULL, BinClass, Replicas, entries, place
from benchmarks.placement.configurations import NeedyModel, plan_needs
from benchmarks.placement.model_groups import groups, pair_up
from benchmarks.placement.needs import Need, whole
from symphony_serve.errors import ServeError


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
        models.append(NeedyModel(str(number), draw(st.integers(1, 2000)), slo, tuple(known)))
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
