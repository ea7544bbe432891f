"""Seeded schedules of faults through trials, engine and played workers; `tests.trials.schedules` plays more of them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fluidtune.trials import TrialStateMachine
from fluidtune.trials.life_states import CHANGES, PLACES, WISHES
from tests.trials.played import play

#: Changes that few schedules have; `test_lifecycle` has them all.
SELDOM = {
    ("placed", "queued"),
    ("placed", "released"),
    ("moving", "placed"),
    ("moving", "released"),
    ("loading", "ended"),
}


def test_a_schedule_is_the_same_each_time(tmp_path: Path) -> None:
    assert play(7, tmp_path) == play(7, tmp_path)


def test_nothing_is_lost_or_done_twice_no_trial_stands_still_and_every_change_of_state_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What never happens should not be drawn."""
    seen: dict[Any, set[str]] = defaultdict(set)

    def watched(method: str, read: Any) -> None:
        change = getattr(TrialStateMachine, method)

        def noted(life: TrialStateMachine, state: Any) -> None:
            if read(life) != state:
                seen[read(life), state].add(life.under_way.partition("(")[0])
            change(life, state)

        monkeypatch.setattr(TrialStateMachine, method, noted)

    watched("go", lambda life: life.place)
    watched("turn", lambda life: life.crew.change)
    watched("ask_to", lambda life: life.wish)
    drawn = set(PLACES) | set(CHANGES) | set(WISHES)
    for seed in range(300):
        play(seed, tmp_path)
    assert set(seen) <= drawn and drawn - set(seen) <= SELDOM
    assert all(seen[pair] <= set(causes.split(", ")) for pair, causes in (PLACES | WISHES).items())
