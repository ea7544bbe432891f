"""What `test_kinds_of_loops` trains: every kind at every history of widths, mixed with others. Runs no loop."""

from __future__ import annotations

from collections import defaultdict

import pytest

from .kinds_of_loops import Mix
from .mixes import AHEAD, ALIKE, AXES, HISTORIES, KINDS, cover, may_be_refused, search, seen, sensible, stop_of


@pytest.fixture(scope="module")
def rows():
    return list(cover())


def test_there_are_sixty_kinds_and_the_issues_histories():
    assert len(KINDS) >= 60
    assert sorted(HISTORIES.values()) == [(1, 1, 1), (2, 1, 1), (2, 1, 3), (2, 2, 2), (3, 3, 3)]


def test_every_kind_is_seen_at_every_history(rows):
    found = {
        name: {kind for each, mix in rows if each == name for kind in seen(mix, HISTORIES[name])} for name in HISTORIES
    }
    for name in HISTORIES:
        assert found[name] == set(KINDS), set(KINDS) - found[name]


def test_loops_that_fetch_ahead_grow_too(rows):
    for name, widths in HISTORIES.items():
        for step in AHEAD:
            assert any(each == name and mix.step == step and not may_be_refused(mix, widths) for each, mix in rows), (
                name,
                step,
            )
            assert max(widths) == 1 or any(
                each == name and mix.step == step and mix.data != ALIKE for each, mix in rows
            ), (name, step)


def test_every_mix_makes_sense_and_comes_once(rows):
    assert all(sensible(mix) for _, mix in rows)
    assert len(set(rows)) == len(rows)


def others_of(mixes):
    """(axis, kind) -> another axis -> the kinds that it was mixed with."""
    met = defaultdict(lambda: defaultdict(set))
    for mix in mixes:
        for axis, kind in vars(mix).items():
            for other, with_kind in vars(mix).items():
                if other != axis:
                    met[axis, kind][other].add(with_kind)
    return met


def test_every_kind_is_mixed_with_different_others(rows):
    met = others_of(mix for _, mix in rows)
    for axis, kind in KINDS:
        for other in AXES:
            if other != axis and (kind, other) != ("group added", "schedule"):  # it goes with two schedules
                assert len(met[axis, kind][other]) >= 3, (axis, kind, other)


def test_a_loop_that_stops_early_has_a_turn_at_each_width():
    for widths in HISTORIES.values():
        assert stop_of(Mix(), widths) == len(widths) + 1
        assert stop_of(Mix(extra="stops early"), widths) - 1 == len(widths) + 1


def examples(axis, kind, history, number):
    """What the longer search draws for this kind and history."""
    found = []
    search(axis, kind, history, number, found.append)
    return found


def test_the_longer_search_draws_other_mixes_for_each_kind_and_history():
    first = []
    for axis, kind in KINDS:
        own = [mix for history in HISTORIES for mix in examples(axis, kind, history, 2)]
        assert len(set(own)) >= 2 * len(HISTORIES) - 1, (axis, kind)
        assert all(getattr(mix, axis) == kind for mix in own)
        first += own[::2]
    assert len(set(first)) > 0.95 * len(first)
