"""What becomes of an act, without Tune: golden examples, and any events in any order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.steering import acts as a

PAGE = (Path(__file__).parents[2] / "docs" / "view.md").read_text()
RUNS = a.Facts(parameters={"lr": "a number", "net/depth": "a number", "act": "text", "fn": ""}, has_checkpoint=False)


def act(kind: Any, name: str = "1", trial: str = "t", **more: Any) -> a.Act:
    return a.Act(name, kind, trial, "ann", "command line", **more)


def said(steering: a.Steering, asked: a.Act, facts: a.Facts = RUNS) -> str:
    """What an act is refused with; "" if it is taken."""
    orders = steering.asked(asked, facts)
    assert isinstance(orders[0], a.Note) and orders[0].state == "asked"
    if not orders[1:]:
        note, answer = steering.carried_out(asked.id, "new" if asked.kind == "clone" else "")
        assert isinstance(note, a.Note) and note.state in ("taken", "done")
        assert isinstance(answer, a.Answer) and not answer.refused
        return ""
    _, note, answer = orders
    assert note == a.Note(asked, "refused", answer.words) and answer.refused  # type: ignore[union-attr]
    return answer.words  # type: ignore[union-attr]


def test_the_diagram_shows_exactly_the_changes_of_the_code() -> None:
    drawn = PAGE[PAGE.index("## How an act goes") :].split("```")[1]
    arrows = re.findall(r"^    (\w+) --> (\w+): (.+)$", drawn, re.MULTILINE)
    assert {(before, after): causes for before, after, causes in arrows} == a.STATES
    assert {state for pair in a.STATES for state in pair} == set(get_args(a.State))
    assert all(hasattr(a.Steering, cause) for causes in a.STATES.values() for cause in causes.split(", "))


def test_a_kept_trial_goes_on_once_the_algorithm_wants_to_stop_it() -> None:
    steering = a.Steering()
    assert steering.stop_meant("t") is None
    assert said(steering, act("keep")) == ""
    assert not steering.goes_on_alone("t")
    note = steering.stop_meant("t")
    assert note is not None and (note.act, note.state) == (act("keep"), "done")
    assert steering.goes_on_alone("t") and not steering.goes_on_alone("u")
    # It can still be stopped, and then it ends.
    assert said(steering, act("stop", "2")) == ""
    assert steering.stops == {"t"}
    assert steering.ended("t") == [a.Note(act("stop", "2"), "done")] and steering.stops == set()


@pytest.mark.parametrize(
    ("asked", "facts", "why"),
    [
        (act("stop"), a.Facts(ended=True), "ended already"),
        (act("keep"), a.Facts(no_keep="it would change a bracket"), "cannot be kept: it would change a bracket"),
        (act("clone", parameters={"rate": 1}), RUNS, "no parameter rate; it has lr, net/depth, act, fn"),
        (act("clone", parameters={"lrr": 1}), RUNS, "did you mean lr?"),
        (act("clone", parameters={"lr": "big"}), RUNS, 'trial t has a number as its lr, and "big" is none'),
        (act("clone", parameters={"lr": None}), RUNS, "null is none"),
        (act("clone", parameters={"lr": True}), RUNS, "true is none"),
        (act("clone", parameters={"net/depth": 3, "act": ["relu"]}), RUNS, "has text as its act"),
        (act("clone", parameters={"fn": "x"}), RUNS, "has a fn that is no JSON value"),
        (act("clone", from_checkpoint=True), RUNS, "no checkpoint"),
    ],
)
def test_what_cannot_be_is_refused_in_words(asked: a.Act, facts: a.Facts, why: str) -> None:
    assert why in said(a.Steering(), asked, facts)


def test_what_was_asked_for_twice_is_done_once() -> None:
    steering = a.Steering()
    clone = act("clone", parameters={"lr": 0.5, "net/depth": 3})
    assert said(steering, clone) == ""
    words = "trial new is a clone of trial t"
    assert steering.asked(clone, RUNS) == [a.Answer(False, words)]  # a double click: one id
    assert said(steering, act("stop", "2")) == ""
    assert "ann has asked for that (command line)" in said(steering, act("stop", "3"))
    assert "ends at its next result" in said(steering, act("keep", "4"))
    assert said(steering, act("clone", "5"), a.Facts(ended=True)) == "", "one that has ended can be cloned"


def test_what_an_earlier_driver_has_saved_holds() -> None:
    steering = a.Steering()
    clone = act("clone", "3", clone="c")
    for each, state in ((act("stop", "1"), "taken"), (act("keep", "2", "u"), "done"), (clone, "done")):
        steering.restored(each, state)  # type: ignore[arg-type]
    assert steering.stops == {"t"}
    assert steering.goes_on_alone("u")
    (answer,) = steering.asked(clone, RUNS)
    assert answer == a.Answer(False, "trial c is a clone of trial t")


def test_a_clone_that_cannot_be_made_is_refused_and_can_be_asked_for_again() -> None:
    steering = a.Steering()
    steering.asked(act("clone"), RUNS)
    note, answer = steering.failed("1", "the disk is full")
    assert note == a.Note(act("clone"), "refused", "the disk is full") and answer == a.Answer(True, "the disk is full")
    assert said(steering, act("clone", "2")) == ""


def test_what_cannot_be_true_is_an_error() -> None:
    steering = a.Steering()
    steering.restored(act("stop"), "taken")
    steering.asked(act("clone", "open"), RUNS)
    for event in (lambda: steering.carried_out("x"), lambda: steering.failed("x", "why"), lambda: said(steering, OPEN)):
        with pytest.raises(a.SteeringError):
            event()


OPEN = act("stop", "open")


@st.composite
def asking(draw: Any) -> a.Act:
    return act(draw(st.sampled_from(get_args(a.Kind))), str(draw(st.integers(0, 6))), draw(st.sampled_from("tu")))


@given(st.lists(asking() | st.tuples(st.sampled_from(["stop_meant", "ended"]), st.sampled_from("tu")), max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_history_makes_only_drawn_changes_and_ends_what_was_taken(history: list[Any]) -> None:
    """A trial that has ended has no act left to happen; an id is carried out once; a taken stop ends each result."""
    steering, ended, carried, last = a.Steering(), set(), [], {}
    stops = set()
    for event in history:
        if isinstance(event, a.Act):
            orders = steering.asked(event, a.Facts(ended=event.trial in ended))
            if not isinstance(orders[-1], a.Answer):
                carried.append(event.id)
                orders += steering.carried_out(event.id, "c" if event.kind == "clone" else "")
                if event.kind == "stop":
                    stops.add(event.trial)
            assert sum(isinstance(order, a.Answer) for order in orders) == 1
        elif event[1] in ended:
            continue
        elif event[0] == "ended":
            ended.add(event[1])
            orders = list(steering.ended(event[1]))
        else:
            orders = list(filter(None, [steering.stop_meant(event[1])]))
        assert steering.stops == stops - ended
        for order in orders:
            if isinstance(order, a.Note):
                before = last.get(order.act.id)
                assert order.state == "asked" if before is None else (before, order.state) in a.STATES
                last[order.act.id] = order.state
                if order.state == "taken":
                    assert order.act.trial not in ended
    assert len(set(carried)) == len(carried)
