"""When an epoch that ran again counts as the same, on cores and where sums have no fixed order."""

from __future__ import annotations

from collections import OrderedDict

import numpy
import pytest
import torch

from fluidtune.elastic.commits import proof
from fluidtune.elastic.commits.proof import Epoch, differences, is_measured, machine
from fluidtune.elastic.random_streams import capture_streams

NAMES = ["module", "optimizer", "elastic.state()"]


def state(weight=1.0, **more):
    """A state of three objects; ``weight``: all numbers of the module."""
    parts = [
        OrderedDict(weight=torch.full((4,), float(weight)), batches=torch.tensor(more.get("batches", 3))),
        {
            "state": {0: {"step": torch.tensor(5.0), "seen": more.get("seen", 4)}},
            "param_groups": [{"lr": more.get("lr", 0.1)}],
        },
        {"steps": more.get("steps", 7), "best": more.get("best", 0.5)},
    ]
    return {
        "stateful": parts,
        "loose": [torch.ones(1) * more.get("loose", 1.0)],
        "parameters": [(True, more.get("gradient"))],
        "generators": [[torch.Generator().manual_seed(more.get("seed", 1)).get_state()]],
        "samplers": [[{"epoch": more.get("epoch", 2)}]],
        "streams": {"torch": torch.tensor([more.get("drawn", 1)], dtype=torch.uint8), "python": object()},
    }


def said(exact, now=None, reports=None, then=None):
    before = state(weight=0.0)
    epoch = Epoch(before, state(), [{"loss": 0.5}] if then is None else then)
    return differences(now or state(), [{"loss": 0.5}] if reports is None else reports, epoch, NAMES, exact)


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_equal_to_the_bit_is_equal_anywhere(exact):
    nan = [{"loss": float("nan"), "name": "a", "matrix": numpy.ones(2), "parts": {"a": [1, 2.0]}}]
    assert said(exact) is None and said(exact, reports=nan, then=[{**nan[0], "matrix": numpy.ones(2)}]) is None


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"weight": 1.5}, "the module"),
        ({"batches": 4}, "the module"),
        ({"seen": 5}, "the optimizer"),
        ({"lr": 0.05}, "the optimizer"),
        ({"steps": 8}, "'steps' of elastic.state()"),
        ({"best": 0.25}, "'best' of elastic.state()"),
        (
            {"steps": 8, "best": 0.25, "weight": 3},
            "the module, 'steps' of elastic.state(), 'best' of elastic.state()",
        ),
        ({"loose": 3.0}, "a parameter that belongs to no module"),
        ({"gradient": torch.ones(2)}, "a gradient"),
        ({"seed": 2}, "the generator of DataLoader 1"),
        ({"epoch": 3}, "the sampler of DataLoader 1"),
        ({"drawn": 2}, "the random stream of torch"),
    ],
    ids=str,
)
@pytest.mark.parametrize("exact", [True, False])
def test_what_differs_is_named(changed, part, exact):
    assert said(exact, now=state(**changed)) == f"ends with other values of {part}"


@pytest.mark.parametrize(
    ("changed", "same_roughly"),
    [
        ({"weight": 1.0 + 1e-7}, True),
        ({"weight": 1.09}, True),  # the epoch has moved it by 1
        ({"weight": 1.11}, False),
        ({"weight": float("nan")}, False),
        ({"lr": 0.1001}, True),
        ({"lr": 0.105}, False),
        ({"best": 0.505}, True),
    ],
    ids=str,
)
def test_rounding_counts_where_sums_have_an_order(changed, same_roughly):
    assert said(True, now=state(**changed))
    assert (said(False, now=state(**changed)) is None) == same_roughly


def test_metrics_are_compared_but_for_what_is_measured():
    assert said(True, reports=[{"loss": 0.5, "time_s": 3}], then=[{"loss": 0.5, "time_s": 4}]) is None
    assert said(True, reports=[{"loss": 0.505}]) == "reports loss 0.505, not 0.5"
    assert said(False, reports=[{"loss": 0.505}]) is None
    assert said(False, reports=[{"loss": 0.515}]) == "reports loss 0.515, not 0.5"
    assert said(True, reports=[]) == "reports 0 times, not 1"
    assert said(True, reports=[{"loss": 0.5, "acc": 1}]) == "reports acc, which it did not before"
    assert said(True, reports=[{}]) == "reports no loss"
    assert said(True, reports=[{"loss": torch.tensor(0.25)}]) == "reports loss 0.25, not 0.5"
    both = said(True, now=state(weight=2), reports=[{"loss": 1}])
    assert both == "reports loss 1, not 0.5 and ends with other values of the module"
    many = said(True, reports=[dict.fromkeys("abcde", 1)], then=[dict.fromkeys("abcde", 2)])
    assert many == "reports a 1, not 2, b 1, not 2, c 1, not 2"


MEASURED = ("time_total", "epoch_s", "dataTime", "gpu_mem", "samples_per_second", "elapsed", "took_ms")
MADE = ("loss", "s", "best", "eval_loss", "classes", "steps", "sentiment")


@pytest.mark.parametrize("name", MEASURED + MADE)
def test_what_is_measured_is_told_by_its_name(name):
    assert is_measured(name) == (name in MEASURED)


def test_objects_are_compared_by_what_they_hold():
    class Held:
        def __init__(self, value):
            self.value = value

    def other(value):
        return type("Held", (), {"__qualname__": Held.__qualname__, "value": 1, "__init__": Held.__init__})(value)

    same = proof._Comparison(exact=True).equal
    assert same(Held([1, torch.ones(2)]), Held([1, torch.ones(2)])) and not same(Held([1]), Held([2]))
    assert same(Held(1), other(1)) and not same(Held(1), other(2)) and not same(Held(1), 1)
    assert same(lambda x: x + 1, lambda y: y + 1) and not same(lambda x: x + 1, lambda x: x - x)
    assert same({1, 2}, {2, 1}) and not same({1}, {2}) and not same("a", "b") and not same([1], [1, 2])
    assert not same(torch.ones(2), torch.ones(2, dtype=torch.float64)) and not same(torch.ones(1), 1.0)
    assert same(torch.eye(2).to_sparse(), torch.eye(2).to_sparse())
    a, b = Held(None), Held(None)
    a.value, b.value = a, b
    assert same(a, b)


def test_the_name_of_what_computes_says_how_many_threads_do():
    here = machine(torch.device("cpu"))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert machine(torch.device("cpu")) != here
    torch.set_num_threads(threads)
    assert machine(torch.device("cpu")) == here
    assert machine(torch.device("cuda", 1)) == machine(torch.device("cpu"), divided=True) == ""
    assert {"torch", "python"} <= capture_streams().keys()
