"""What `test_kinds_of_loops` trains: every kind at every history of widths, mixed with others. Runs no loop."""

from __future__ import annotations

import pytest

from .mixes import AHEAD, ALIKE, HISTORIES, KINDS, may_be_refused, seen, stop_of, table


@pytest.mark.parametrize("name", HISTORIES)
def test_every_kind_is_seen_at_every_history(name):
    widths = HISTORIES[name]
    mixes = [mix for each, mix in table() if each == name]
    found = {kind for mix in mixes for kind in seen(mix, widths)}
    assert found == set(KINDS), found.symmetric_difference(KINDS)
    assert len(set(mixes)) == len(mixes)
    for step in AHEAD:  # loops that fetch ahead grow, too
        of_step = [mix for mix in mixes if mix.step == step]
        assert any(not may_be_refused(mix, widths) for mix in of_step)
        assert any(mix.data != ALIKE for mix in of_step)
    assert all(stop_of(mix, widths) - (mix.extra == "stops early") == len(widths) + 1 for mix in mixes)
