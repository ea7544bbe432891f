"""Fixtures of the tests of fused trials."""

from __future__ import annotations

from collections import Counter

import pytest

from fluidtune.elastic.fused.flat_steps import FlatStep
from fluidtune.elastic.fused.fused_call import FusedCall


@pytest.fixture(autouse=True)
def as_in_a_worker(one_thread: None) -> None:
    """All these tests."""


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
