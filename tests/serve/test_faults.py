"""Seeded faults over the scheduler. `tests.serve.fault_schedules` runs more."""

from __future__ import annotations

import pytest

from tests.serve.fault_schedules import World


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 400), marks=pytest.mark.slow)], ids=str)
def test_seeded_faults(seeds):
    outcomes = set()
    for seed in seeds:
        outcomes.update(World(seed).play().values())
    assert outcomes >= {"answered", "LATE", "CANCELLED", "UNKNOWN_MODEL", "GPU_LOST", "LOST_TWICE"}
