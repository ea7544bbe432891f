"""The machine of common batches does what its table says."""

from __future__ import annotations

import math
import re
from typing import get_args

import pytest

from fluidtune.elastic.alike import common_batches
from fluidtune.elastic.alike.common_batches import EACH, CommonBatches, State, compares

EVENTS = {
    "formed with joiners": lambda batches: batches.formed(joiners=True),
    "formed without": lambda batches: batches.formed(joiners=False),
    "compared": lambda batches: batches.compared(),
    "stepped": lambda batches: batches.stepped(),
    "drawn": lambda batches: batches.draw(may_divide=False),
    "drawn, may begin": lambda batches: batches.draw(may_divide=True),
    "turn ends": lambda batches: batches.turn_ended(),
    "turn ends, other": lambda batches: batches.turn_ended(),
    "due again": lambda batches: batches.ask_again(),
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
    """Gradients are compared of common batches only, and in states "first" and "divided" none is common.

    A comparison is due again only after a turn in which batches were divided.
    """
    absent = {(event, state) for (state, event), next_one in TABLE.items() if next_one == "-"}
    before = {*get_args(State)} - {"divided", "differed"}
    assert absent == {("compared", "divided"), ("compared", "first"), *(("due again", state) for state in before)}
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


@pytest.mark.parametrize("turns", [1, EACH, EACH + 1, 100, 1000])
def test_a_long_group_begins_at_most_2_and_log2_of_its_turns_with_a_comparison(turns):
    batches, begun = CommonBatches(), []
    batches.formed(joiners=True)
    for turn in range(1, turns + 1):
        if batches.state == "unproven":
            batches.state = "proven"
        for each in range(3):
            common = batches.draw(may_divide=each > 0)
            begun += [turn] if common else []
            batches.got(common)
            if common:
                batches.compared()
        due = batches.due_again
        batches.turn_ended()
        if due:
            batches.ask_again()
    assert begun == [turn for turn in range(1, turns + 1) if compares(turn)]
    assert len(begun) <= 2 + max(2, math.log2(turns))


def test_a_loop_whose_turns_are_whole_where_they_begin_with_a_comparison_is_compared_once():
    batches = CommonBatches()
    batches.formed(joiners=True)
    batches.state = "proven"
    for turn in range(10):
        common = [batches.draw(may_divide=False) for _ in range(3)]
        assert common == [turn == 0] * 3
        for each in common:
            batches.got(each)
        assert not batches.due_again
        batches.turn_ended()


def test_a_failure_may_come_of_a_whole_batch_after_divided_turns():
    batches = CommonBatches()
    batches.ask_again()
    assert batches.fails_divided(ValueError("8 is not 4"), 2) is None
    batches.got(True)
    assert batches.fails_divided(ValueError("8 is not 4"), 2) is not None
