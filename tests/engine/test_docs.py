"""docs/engine.md agrees with the code: statuses of a trial, steps of `Engine.handle`, names of numbers of trials."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args

from fluidtune.engine import Engine, device_table, packing_search, state, width_rules
from fluidtune.engine.trial import TRANSITIONS, Status

PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()


def test_the_diagram_shows_exactly_the_transitions_of_the_code():
    arrows = re.findall(r"^    (\w+) --> (\w+): (.+)$", PAGE, re.MULTILINE)
    assert {(before, after): cause for before, after, cause in arrows} == TRANSITIONS
    assert {status for pair in TRANSITIONS for status in pair} == set(get_args(Status))


def test_the_steps_of_handle_are_in_the_order_of_the_code():
    section = PAGE[PAGE.index("## What `Engine.handle` does") : PAGE.index("## How c is found")]
    listed = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    decisions = inspect.getsource(Engine.handle).split("self._undelivered = self._undelivered, []")[1]
    called = re.findall(r"out \+= (\w+)\(|state\.(\w+)\(\)", decisions)
    assert listed == [decided or changed for decided, changed in called]


def test_every_name_of_a_number_of_trials_per_device_is_in_the_code():
    section = PAGE[PAGE.index("These are all the numbers") : PAGE.index("## Where a change belongs")]
    sources = "".join(map(inspect.getsource, (device_table, packing_search, state, width_rules)))
    names = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    assert len(names) == 7
    for name in names:
        assert re.search(rf"(self\.|def |    ){name}\b", sources), name
