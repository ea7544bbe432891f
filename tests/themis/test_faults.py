"""Seeded faults over the arbiter and its agents, and that their checks can fail."""

from __future__ import annotations

import itertools

import pytest

from tests.themis.fault_schedules import World
from themis_bridge.lease_manager import LeaseManager

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_seeded_faults(first):
    for seed in range(first, first + 20):
        World(seed).run()


def test_the_invariants_can_fail(monkeypatch):
    """An arbiter that does not wait until a reservation is removed violates an invariant."""
    close = LeaseManager.close_expired

    def hasty(self):
        close(self)
        for lease in [each for each in self._state.leases if each.closing]:
            self._state.leases.drop(lease)

    monkeypatch.setattr(LeaseManager, "close_expired", hasty)
    with pytest.raises(AssertionError, match=r"seed|GPU"):
        for seed in itertools.count():
            World(seed).run()
