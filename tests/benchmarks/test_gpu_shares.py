"""Shares of GPUs by MIG and MPS: capacity for every rate, no slot twice, and as few GPUs as the bound."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement.gpu_shares import MIG, Segment, SharedModel, percents, plan_shares

TEN = percents([20, 50, 70])


def planned(models, sharing=MIG, gpus=None, memory=math.inf, part=1.0):
    plan = plan_shares(models, sharing, gpus, memory, part, 60.0)
    assert plan.ended and (gpus is None or len(plan.gpus) <= gpus)
    for number, model in enumerate(models):
        its = [one.segment for gpu in plan.gpus for one in gpu if one.model == number]
        assert sum(one.capacity for one in its) >= model.rate * plan.part * (1 - 1e-5)
        assert all(one in model.segments and 2 * one.latency <= model.slo for one in its)
        assert all(one.processes * model.bytes <= memory * sharing.memory(one.size) for one in its)
    for gpu in plan.gpus:
        slots = [one.slot + at for one in gpu for at in range(sharing.shares[one.segment.size][0])]
        assert gpu and len(set(slots)) == len(slots) and max(slots) < sharing.slots
        assert all(one.slot in sharing.shares[one.segment.size][1] for one in gpu)
    return plan


def model(name, rate, capacities, slo=1.0, latency=0.1):
    return SharedModel(name, rate, slo, tuple(Segment(size, 8, 1, one, latency) for size, one in capacities.items()))


@st.composite
def cases(draw):
    sharing = draw(st.sampled_from([MIG, TEN]))
    sizes = sorted(sharing.shares)
    models = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        some = draw(st.lists(st.sampled_from(sizes), min_size=1, unique=True))
        capacities = {size: draw(st.integers(1, 40)) for size in some}
        models.append(model(name, draw(st.integers(1, 60)), capacities))
    return sharing, models


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_plan_keeps_the_rules(case):
    sharing, models = case
    plan = planned(models, sharing)
    assert len(plan.gpus) == plan.bound
