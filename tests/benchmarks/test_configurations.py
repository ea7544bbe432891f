"""USHER's plan: no other pairs suit better, and each plan keeps the rules."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement.configurations import NeedyModel, plan_needs
from benchmarks.placement.needs import Need
from symphony_serve.errors import ServeError


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
