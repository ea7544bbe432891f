"""Seeded faults over the arbiter and its agents, and that their checks can fail."""

from __future__ import annotations

import itertools

import pytest

from tests.themis.fault_schedules import play
from themis_bridge.leases import LeaseTable

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.core), 20])
def test_seeded_faults(first):
    for seed in range(first, first + 20):
        play(seed)


def test_the_invariants_can_fail(monkeypatch):
    """An arbiter that gives a token twice violates an invariant."""
    grant = LeaseTable.grant

    def forgetful(self, *args):
        self.token = 0
        return grant(self, *args)

    monkeypatch.setattr(LeaseTable, "grant", forgetful)
    with pytest.raises(AssertionError, match=r"^seed"):
        for seed in itertools.count():
            play(seed)
