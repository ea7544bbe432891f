"""What modules return in an evaluation is the same in two workers, or the module that differs is named."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from fluidtune.elastic.data.outputs import _CALLS, Outputs


def noted(*modules: nn.Module) -> tuple[Outputs, torch.Tensor]:
    outputs = Outputs()
    outputs.watch()
    for module in modules:
        module(torch.arange(12.0).reshape(3, 4))
    outputs.stop()
    return outputs, outputs.row()


def layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def compared(ours: tuple[nn.Module, ...], *others: tuple[nn.Module, ...]) -> str | None:
    outputs, row = noted(*ours)
    return outputs.apart(torch.stack([row, *(noted(*each)[1] for each in others)]))


def test_the_same_weights_make_the_same_and_others_do_not():
    assert compared((layers(1),), (layers(1),)) is None
    assert compared((layers(1),), (layers(1),), (layers(2),)) == "Sequential"
    assert compared((layers(1), layers(2)), (layers(1), layers(3))) == "Sequential"


def test_an_order_of_the_same_numbers_is_seen():
    class Flipped(nn.Module):
        def forward(self, x):
            return x.flip(0)

    assert compared((nn.Identity(),), (Flipped(),)) == "Identity"


def test_rounding_is_none():
    other = layers(1)
    with torch.no_grad():
        other[0].weight *= 1 + 1e-6
    assert compared((layers(1),), (other,)) is None


def test_a_call_of_the_leader_alone_and_one_too_many_are_passed_over():
    assert compared((layers(1),), ()) is None
    assert compared((), (layers(1),)) is None
    many = [nn.Identity()] * _CALLS
    assert compared((*many, layers(1)), (*many, layers(2))) is None


def test_nothing_is_noted_before_and_after():
    outputs, row = noted(layers(1))
    with mock.patch.object(outputs, "_leave", side_effect=AssertionError):
        layers(2)(torch.ones(3, 4))
    assert not outputs.watched and torch.equal(outputs.row(), row)


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_what_is_not_finite_or_nothing_says_nothing(value):
    class Filled(nn.Module):
        def forward(self, x):
            return torch.full_like(x, value)

    assert compared((Filled(),), (layers(1),)) is None
