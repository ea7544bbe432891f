"""Fixtures of the tests of fused trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from fluidtune.elastic.fused.flat_steps import FlatStep
from fluidtune.elastic.fused.fused_call import FusedCall


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As a worker on one core has it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """How many calls were done as one, by the number of trials in them, and how many steps over all parameters."""
    found: Counter[tuple[str, int]] = Counter()
    forward, step = FusedCall.forward, FlatStep.step

    def counted_forward(self: FusedCall) -> None:
        forward(self)
        found["call", len(self.calls)] += 1

    def counted_step(self: FlatStep) -> bool:
        done = step(self)
        found["step", 1] += done
        return done

    monkeypatch.setattr("fluidtune.elastic.fused.baton.PATIENCE", float("inf"))  # whatever else this machine does
    monkeypatch.setattr(FusedCall, "forward", counted_forward)
    monkeypatch.setattr(FlatStep, "step", counted_step)
    return found
