"""Devices of several models in one job: the workers of a trial are all on devices of one model."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.engine import (
    DeviceGained,
    DeviceLost,
    Engine,
    GroupAnnounced,
    KindFound,
    ModelFound,
    Release,
    Resize,
    Resized,
    Result,
    Start,
    TrialEnded,
)
from fluidtune.engine.device_models import DeviceModels
from tests.engine.helpers import Bench, elastic, plain

FAST, SLOW = "H100", "L4"


def told(models: str) -> list[ModelFound]:
    """Of each device its model: F, S, or ? where no worker has told."""
    return [ModelFound(at, {"F": FAST, "S": SLOW}[model]) for at, model in enumerate(models) if model != "?"]


def alone(devices: int, events: list[ModelFound]) -> Bench:
    """One trial on device 0, just found to be elastic and not measured; the other devices are idle."""
    bench = Bench(devices)
    assert bench(*events, plain("a", 1000)) == [Start("a", (0,), 1.0)]
    assert bench(KindFound("a", "elastic")) == []
    return bench


@pytest.mark.parametrize("models", ["FSFSFF", "FSFS??", "?SFS??"])
def test_a_trial_grows_only_to_devices_of_its_own_model(models: str) -> None:
    bench = alone(6, told(models))
    assert bench(ModelFound(0, FAST), Result("a", 1.0, 1)) == [Resize("a", (0, 2))]
    bench(Resized("a", (0, 2), 0.1))
    (wider,) = bench.results("a", 0.5, 3, width=2)
    assert wider == Resize("a", (0, 2, 4, 5)), "also to devices whose model nobody knows"


def test_a_trial_that_is_over_two_models_goes_back_to_that_of_its_first_device() -> None:
    bench = alone(4, [])
    bench(ModelFound(0, FAST))
    assert bench(Result("a", 1.0, 1)) == [Resize("a", (0, 1))]
    # The worker on device 1 tells of its GPU before it is a worker of the trial; the resize is under way.
    assert bench(ModelFound(1, SLOW)) == []
    assert bench(Resized("a", (0, 1), 0.1)) == [Resize("a", (0,))]
    assert bench(Resized("a", (0,), 0.1)) == [Release("a", (1,)), Resize("a", (0, 2))]


def test_each_model_is_divided_among_the_trials_on_it() -> None:
    bench = Bench(6)
    trials = [plain("a", 900), plain("b", 300), plain("c"), plain("d"), plain("e"), plain("f")]
    bench(*told("FFFSSS"), *trials)
    bench(KindFound("a", "elastic"), KindFound("b", "elastic"))
    assert bench.engine.held_devices()["b"] == (1,)
    done = [TrialEnded(name, "stopped") for name in "cdef"]
    out = bench(*done, Result("a", 1.0, 1), Result("b", 1.0, 1))
    grown = [each for each in out if isinstance(each, Resize)]
    assert grown == [Resize("a", (0, 2))], "the three slow ones stay idle"


def test_a_trial_over_several_devices_of_one_node_gets_them_of_one_model_if_it_can() -> None:
    for models, devices in (("FSFS", (0, 2)), ("SFFS", (0, 3)), ("FSSS", (1, 2)), ("????", (0, 1))):
        bench = Bench(4)
        assert bench(*told(models), plain("a", share=2.0)) == [Start("a", devices, 1.0)], models
    bench = Bench(2)
    # As under stock: it would wait for ever.
    assert bench(*told("FS"), plain("a", share=2.0)) == [Start("a", (0, 1), 1.0)]


def test_a_lost_device_comes_back_with_another_model() -> None:
    bench = Bench(2)
    bench(*told("FF"), DeviceLost(1), ModelFound(1, SLOW))
    assert not bench.engine._state.devices.models.mixed, "told late: the device was not there"
    bench(DeviceGained(1), ModelFound(1, SLOW))
    assert bench.engine._state.devices.models.mixed


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
        models.validate()
    assert models.mixed is (len(set(known.values())) > 1)
    like = models.like(device, range(8))
    assert set(like) == {at for at in range(8) if known.get(at, known.get(device)) == known.get(device, known.get(at))}
    assert [other in known for other in like] == sorted((other in known for other in like), reverse=True)
    assert sorted(at for part in models.by_model(range(8)) for at in part) == list(range(8))


def instructions(seed: int, models: str, elastics: int) -> list:
    """What an engine on 6 devices says in a job of made-up trials. ``models``: those that are told, see `told`."""
    draw = random.Random(seed)
    engine, out = Engine(max_packing=draw.choice([None, 1, 2])), []
    batch: list = [DeviceGained(device, f"node{device // 3}") for device in range(6)]
    batch.append(GroupAnnounced("g", draw.random() < 0.5))
    batch += [(elastic if at < elastics else plain)(f"t{at}", draw.randint(1, 30)) for at in range(draw.randint(1, 9))]
    late = told(models)
    random.Random(seed).shuffle(late)
    for now in range(60):
        said = engine.handle(*batch, now=float(now))
        engine.validate_state()
        out += said
        batch = [Resized(each.trial, each.devices, 0.1) for each in said if isinstance(each, Resize)]
        running = [name for name in engine.running if engine.trial(name).status == "running"]
        for name in draw.sample(running, min(len(running), 3)):
            view = engine.trial(name)
            if view.iterations == 0:
                batch.append(TrialEnded(name, "stopped"))
            elif name not in {each.trial for each in batch}:
                batch.append(Result(name, draw.choice([0.5, 1.0]), view.width, 0.2))
        if late and batch:
            batch.append(late.pop())
    return out


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["FFFFFF", "FF??F?"]), st.integers(0, 9))
def test_where_all_devices_are_of_one_model_nothing_changes(seed: int, models: str, elastics: int) -> None:
    assert instructions(seed, models, elastics) == instructions(seed, "??????", elastics)
