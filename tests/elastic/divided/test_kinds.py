"""Loops over all kinds of modules, and of public codes, are equal to themselves alone while their width changes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.elastic.divided.grown import Grown
from tests.elastic.divided.kinds import LOOPS, STEPS

#: Workers in each step.
HISTORIES = {
    "2": [2] * STEPS,
    "1-2-1": [1] * 2 + [2] * 7 + [1] * 7,
    "1-1-3-2-3": [1, 1, *[3] * 5, *[2] * 4, *[3] * 5],
}
_alone: dict[str, Any] = {}


def trained(name: str, widths: list[int] | None) -> tuple[list[float], list[torch.Tensor], int, list[Any]]:
    """Losses, weights with the next random number, divided calls, and what was checked. ``widths``: None: alone."""
    torch.set_num_threads(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    grown = None if widths is None else Grown()
    losses, divided = [], 0
    try:
        running = LOOPS[name].make()
        while True:
            if grown is not None:
                grown.width((widths or [])[min(len(losses), STEPS - 1)])
            try:
                losses.append(next(running))
            except StopIteration as end:
                made = end.value
                break
            if grown is not None:
                divided += grown.division.followers.divided
        if grown is not None:
            grown.facts()
    finally:
        if grown is not None:
            grown.close()
        torch.set_default_dtype(before)
    tensors = [t.detach().clone() for t in (*made.state_dict().values(), torch.rand(1))]
    return losses, tensors, divided, [] if grown is None else grown.checked


@pytest.mark.parametrize(
    "history", ["1-1-3-2-3", *(pytest.param(one, marks=pytest.mark.slow) for one in ("2", "1-2-1"))]
)
@pytest.mark.parametrize("name", LOOPS)
def test_equal_to_alone(name: str, history: str) -> None:
    row = LOOPS[name]
    if name not in _alone:
        _alone[name] = trained(name, None)
    losses, tensors, divided, checked = trained(name, HISTORIES[history])
    assert losses == pytest.approx(_alone[name][0], rel=row.tolerance, abs=1e-12)
    for own, other in zip(tensors, _alone[name][1], strict=True):
        torch.testing.assert_close(own, other, rtol=row.tolerance, atol=row.tolerance)
    assert torch.equal(tensors[-1], _alone[name][1][-1]), "the random stream"
    assert row.divided in (None, bool(divided)), checked
    assert row.word is None or any(row.word in why for _, verdict, why in checked if verdict == "whole"), checked
