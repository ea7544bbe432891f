"""Devices of several models in one job: a trial gets devices of one model before others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.engine import messages as m
from fluidtune.engine.device_table import DeviceModels
from tests.engine.helpers import Bench, alone, plain, resize, start

FAST, SLOW = "H100", "L4"


def told(models: str) -> list[m.ModelFound]:
    """Of each device its model: F, S, or ? where no worker has told."""
    return [m.ModelFound(at, {"F": FAST, "S": SLOW}[model]) for at, model in enumerate(models) if model != "?"]


@pytest.mark.parametrize("models", ["FSFSFF", "FSFS??", "?SFS??"])
def test_a_trial_grows_to_devices_of_its_own_model_first(models: str) -> None:
    bench = alone(6, 1000, told(models))
    assert bench(m.ModelFound(0, FAST), m.Result("a", 1.0, 1)) == [resize("a", (0, 2))]
    bench(m.Resized("a", (0, 2)))
    (wider,) = bench.results("a", 0.5, 3, width=2)
    # A device whose model nobody knows may be alike. Idle devices are of no use to anybody else.
    assert wider == resize("a", (0, 2, 4, 5, 1, 3))


def test_a_trial_that_shrinks_keeps_the_devices_of_its_own_model() -> None:
    bench = alone(4, 1000, told("FSSF"))
    bench(m.Result("a", 1.0, 1))
    bench(m.Resized("a", (0, 3)))
    (wider,) = bench.results("a", 0.5, 3, width=2)
    bench(m.Resized("a", wider.devices), *(m.Result("a", 0.3, 4) for _ in range(3)))
    assert wider.devices == (0, 3, 1, 2)
    out = bench(plain("b"), plain("c"))
    assert out == [resize("a", (0, 3))]


def test_a_trial_over_several_devices_of_one_node_gets_them_of_one_model_if_it_can() -> None:
    for models, devices in (("FSFS", (0, 2)), ("SFFS", (0, 3)), ("FSSS", (1, 2)), ("????", (0, 1))):
        bench = Bench(4)
        assert bench(*told(models), plain("a", share=2.0)) == [start("a", devices, 1.0)], models
    bench = Bench(2)
    # As under stock: it would wait for ever.
    assert bench(*told("FS"), plain("a", share=2.0)) == [start("a", (0, 1), 1.0)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["A", "B", None])), max_size=30), st.integers(0, 7))
def test_what_is_known_of_models(notes: list[tuple[int, str | None]], device: int) -> None:
    models, known = DeviceModels(), {}
    for at, model in notes:
        if model is None:
            models.forget(at)
            known.pop(at, None)
        else:
            assert models.note(at, model) is (known.get(at) != model)
            known[at] = model
    assert models.mixed is (len(set(known.values())) > 1)
    alike = [at for at in range(8) if models.alike(device, at)]
    assert alike == [at for at in range(8) if known.get(at, known.get(device)) == known.get(device, known.get(at))]
    assert sorted(at for part in models.by_model(range(8)) for at in part) == list(range(8))
