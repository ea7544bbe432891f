"""Loops over all kinds of modules and calls are equal to themselves alone, at each width and while it changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.elastic.divided.grown import Grown
from tests.elastic.divided.kinds import DIVIDED, WHOLE

HISTORIES = {"2": [2] * 16, "1-2-1": [1] * 4 + [2] * 9 + [1] * 3, "1-1-3-2-3": [1, 1, *[3] * 5, *[2] * 4, *[3] * 5]}


def trained(make: Any, widths: list[int]) -> tuple[list[float], list[torch.Tensor], int, list[Any]]:
    """Losses, weights with the next random number, divided calls, and what was checked."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    random.seed(1)
    data = torch.Generator().manual_seed(2)
    grown, losses, divided = Grown(), [], 0
    try:
        module, step = make()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        now = 1
        for i, width in enumerate(widths):
            if width != now:
                grown.width(width)
                now = width
            x = torch.randn(13 if i % 4 == 3 else 20, 12, generator=data)
            y = torch.randint(5, (len(x),), generator=data)
            loss = step(module, x, y, i)
            if isinstance(loss, torch.Tensor):
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
            losses.append(float(loss))
            divided += grown.division.followers.divided
            grown.division.followers.divided = 0
        grown.facts()
    finally:
        grown.close()
        torch.set_default_dtype(before)
    tensors = [*module.parameters(), *module.buffers(), torch.rand(1)]
    return losses, [tensor.detach().double().clone() for tensor in tensors], divided, grown.checked


_alone: dict[str, Any] = {}


@pytest.mark.parametrize(
    "history", ["1-1-3-2-3", *(pytest.param(one, marks=pytest.mark.slow) for one in ("2", "1-2-1"))]
)
@pytest.mark.parametrize("kind", [*DIVIDED, *WHOLE])
def test_equal_to_alone(kind: str, history: str) -> None:
    word, make = WHOLE[kind] if kind in WHOLE else (None, DIVIDED[kind])
    if kind not in _alone:
        _alone[kind] = trained(make, [1] * 16)
    losses, tensors, divided, checked = trained(make, HISTORIES[history])
    tolerance = 1e-2 if kind == "autocast" else 1e-5 if kind == "layers_added_frozen_and_cast" else 1e-9
    assert losses == pytest.approx(_alone[kind][0], rel=tolerance)
    for own, other in zip(tensors, _alone[kind][1], strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)
    assert torch.equal(tensors[-1], _alone[kind][1][-1]), "the random stream"
    if word is None:
        assert divided, checked
    else:
        assert any(word in why for _, verdict, why in checked if verdict == "whole"), checked
