"""Seeded faults over the scheduler. `tests.serve.fault_schedules` runs more."""

from __future__ import annotations

import pytest

from tests.serve.fault_schedules import World


def test_a_few_schedules():
    told = [World(seed).run() for seed in range(3)]
    assert all(told)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_seeded_faults(first):
    outcomes = set()
    for seed in range(first, first + 50):
        outcomes.update(World(seed).run().values())
    assert outcomes >= {"answered", "LATE", "CANCELLED"}
