"""The machine of common batches does what its table says."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from fluidtune.elastic.alike import common_batches
from fluidtune.elastic.alike.common_batches import CommonBatches, State

EVENTS = {
    "formed with joiners": lambda batches: batches.formed(joiners=True),
    "formed without": lambda batches: batches.formed(joiners=False),
    "compared": lambda batches: batches.compared(),
    "stepped": lambda batches: batches.stepped(),
    "drawn": lambda batches: batches.draw(may_divide=False),
    "drawn, may begin": lambda batches: batches.draw(may_divide=True),
    "turn ends": lambda batches: batches.turn_ended(),
    "turn ends, other": lambda batches: batches.turn_ended(),
    "differed": lambda batches: batches.differed(),
}


def drawn() -> dict[tuple[str, str], str]:
    """(state, event) -> next state, as the module's docstring draws it."""
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in (common_batches.__doc__ or "").splitlines()
        if line.startswith("| ")
    ]
    (_, *events), _, *states = rows
    found = {}
    for state, *cells in states:
        for event, cell in zip(events, cells, strict=True):
            plain, _, other = cell.partition(", or ")
            found[state, event] = plain
            if event == "drawn":
                found[state, "drawn, may begin"] = other.split()[0] if other else plain
            if event == "turn ends":
                found[state, "turn ends, other"] = other.split()[0] if other else plain
    return found


def in_state(state: str, learned: bool, divided: bool) -> CommonBatches:
    batches = CommonBatches()
    batches.state = state
    if learned:
        before = batches.state
        batches.stepped()
        batches.state = before
    if divided:
        batches.got(False)
    return batches


TABLE = drawn()


def test_the_table_has_every_state_and_event():
    assert {state for state, _ in TABLE} == set(get_args(State))
    assert {event for _, event in TABLE} == set(EVENTS)


@pytest.mark.parametrize(("state", "event"), [pair for pair, next_one in TABLE.items() if next_one != "-"])
def test_each_event_leads_where_the_table_says(state, event):
    batches = in_state(state, learned=event == "turn ends", divided=event == "turn ends, other")
    EVENTS[event](batches)
    assert batches.state == TABLE[state, event]


def test_what_the_table_leaves_out_cannot_come():
    """Gradients are compared of common batches only, and in states "first" and "divided" none is common."""
    assert [state for (state, _), next_one in TABLE.items() if next_one == "-"] == ["divided", "first"]
    assert not CommonBatches().are_common


def test_the_leader_alone_has_seen_a_turn_of_common_batches_only():
    batches = CommonBatches()
    assert not batches.whole_turn
    batches.formed(joiners=True)
    batches.got(True)
    assert batches.whole_turn
    batches.got(False)
    assert not batches.whole_turn
    batches.turn_ended()
    assert not batches.whole_turn


def test_a_follower_hears_when_dividing_begins():
    batches = in_state("proven", learned=True, divided=False)
    batches.follow(True)
    assert batches.state == "proven"
    batches.follow(False)
    assert batches.state == "first"
    assert re.search("unproven", str(common_batches.__doc__))


def test_a_failure_may_come_of_the_first_turn_that_is_divided_after_workers_joined():
    batches, found = CommonBatches(), []

    def turn(*common: bool) -> None:
        for each in common:
            batches.got(each)
        found.append(batches.fails_divided(ValueError("4 is\nnot 8"), 2))
        batches.turn_ended()

    for joiners in (True, False, True):
        batches.formed(joiners=joiners)
        for common in ((True,), (True, False), (False,)):
            turn(*common)
    why = "divided among 2 workers the loop fails: ValueError('4 is\\nnot 8')"
    assert found == [None, why, None, None, None, None, None, why, None]
