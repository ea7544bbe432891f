"""A loop that keeps something for itself gives at every width what it gives alone, or goes on with one worker.

The leader's results are those of the trial alone from the first batch after a growth on, not only once it is known that
a worker differs.
"""

from __future__ import annotations

import re

import pytest

from fluidtune.elastic.checks.rehearsal import rehearse

from . import trials
from .driving import Trip, same, seed
from .hidden_state import LOOPS, ONLY_REHEARSED, REFUSED, REHEARSED, named

pytestmark = [pytest.mark.slow, pytest.mark.core]
#: (width by turn): it grows at once, later, and by more than one; and is wide for more than one turn.
HISTORIES = {"2-2-1-2": (2, 2, 1, 2), "1-1-3-3": (1, 1, 3, 3)}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", [name for name in LOOPS if name not in ONLY_REHEARSED])
def test_every_result_is_as_alone(pool, name, history):
    widths = HISTORIES[history]
    # One that counts its samples by len() counts those twice that two workers have.
    config = {"loop": name, "stop": len(widths) + 2, "samples": history != "2-2-1-2"}
    seed()
    reports, weights = trials.plain(named, config)
    trip = Trip(pool, config, named, refused=REFUSED.get(name, ""))
    got, (values, *_) = trip.go(widths)
    same(got, reports)
    same(values, weights)
    said = pool[0].call(trials.refused)[1]
    assert said is None if name not in REFUSED else re.search(REFUSED[name], said), said


@pytest.mark.parametrize("name", REHEARSED)
def test_a_rehearsal_finds_what_a_divided_batch_changes(name):
    seed()
    verdict = rehearse(lambda: named({"loop": name, "stop": 2}, lambda loss: None))
    assert verdict.kind == "differs" and REHEARSED[name] in verdict.reason


@pytest.mark.parametrize("name", [name for name in LOOPS if name not in REHEARSED])
def test_a_rehearsal_finds_nothing_else(name):
    seed()
    assert rehearse(lambda: named({"loop": name, "stop": 2}, lambda loss: None)).kind == "same"
