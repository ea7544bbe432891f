"""docs/trials.md draws exactly the changes of state that the code has."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from fluidtune.engine import messages as engine
from fluidtune.trials import messages as m
from fluidtune.trials.life import on_event
from fluidtune.trials.life_states import CHANGES, PLACES, WISHES, Change, Place, Wish
from fluidtune.tune.trial_shell import _METHODS
from tests.drawings import changes_of


@pytest.mark.parametrize(
    ("section", "table", "states"),
    [
        ("## Where it is", PLACES, Place),
        ("## What its group does", CHANGES, Change),
        ("## What it is asked to do", WISHES, Wish),
    ],
)
def test_the_diagram_shows_exactly_the_changes_of_the_code(section: str, table: Any, states: Any) -> None:
    assert changes_of("trials.md", section) == {(*pair, one) for pair in table for one in table[pair].split(", ")}
    assert {state for pair in table for state in pair} == set(get_args(states))


def test_every_cause_is_an_event_and_every_message_has_an_owner() -> None:
    causes = {cause for table in (PLACES, CHANGES, WISHES) for causes in table.values() for cause in causes.split(", ")}
    events = {event.__name__ for event in (*m.Event.__subclasses__(), *engine.Instruction.__subclasses__())}
    assert causes <= events | {"Resume"}
    assert {event.__name__ for event in on_event.registry} - {"object"} == events
    assert set(_METHODS) == set(m.Instruction.__subclasses__())
