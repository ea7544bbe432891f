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
    orders = steering.on_event(a.Asked(asked, facts))
    assert isinstance(orders[0], a.Note) and orders[0].state == "asked"
    if orders[1:] == [a.CarryOut(asked)]:
        note, answer = steering.on_event(a.CarriedOut(asked.id, "new" if asked.kind == "clone" else ""))
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
    causes = {cause for causes in a.STATES.values() for cause in causes.split(", ")}
    assert causes <= {event.__name__ for event in get_args(a.Event)}


def test_a_stopped_trial_ends_at_its_next_result() -> None:
    steering = a.Steering()
    assert steering.on_event(a.ResultCame("t")) == []
    assert said(steering, act("stop")) == ""
    assert steering.on_event(a.ResultCame("other")) == []
    assert steering.on_event(a.ResultCame("t")) == [a.EndTrial("t")]
    assert steering.on_event(a.TrialEnded("t")) == [a.Note(act("stop"), "done")]
    assert steering.on_event(a.ResultCame("t")) == []


def test_a_kept_trial_goes_on_once_the_algorithm_wants_to_stop_it() -> None:
    steering = a.Steering()
    assert steering.on_event(a.StopMeant("t")) == []
    assert said(steering, act("keep")) == ""
    assert not steering.goes_on_alone("t")
    order, note = steering.on_event(a.StopMeant("t"))
    assert order == a.LetGoOn(act("keep")) and isinstance(note, a.Note) and note.state == "done"
    assert steering.goes_on_alone("t") and not steering.goes_on_alone("u")
    # It can still be stopped, and then it ends.
    assert said(steering, act("stop", "2")) == ""
    assert steering.on_event(a.ResultCame("t")) == [a.EndTrial("t")]


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
    assert steering.on_event(a.Asked(clone, RUNS)) == [a.Answer(False, words)]  # a double click: one id
    assert said(steering, act("stop", "2")) == ""
    assert "ann has asked for that (command line)" in said(steering, act("stop", "3"))
    assert "ends at its next result" in said(steering, act("keep", "4"))
    assert said(steering, act("clone", "5"), a.Facts(ended=True)) == "", "one that has ended can be cloned"


def test_what_an_earlier_driver_has_saved_holds() -> None:
    steering = a.Steering()
    clone = act("clone", "3", clone="c")
    for each, state in ((act("stop", "1"), "taken"), (act("keep", "2", "u"), "done"), (clone, "done")):
        assert steering.on_event(a.Restored(each, state)) == []  # type: ignore[arg-type]
    assert steering.on_event(a.ResultCame("t")) == [a.EndTrial("t")]
    assert steering.goes_on_alone("u")
    (answer,) = steering.on_event(a.Asked(clone, RUNS))
    assert answer == a.Answer(False, "trial c is a clone of trial t")


def test_a_clone_that_cannot_be_made_is_refused_and_can_be_asked_for_again() -> None:
    steering = a.Steering()
    steering.on_event(a.Asked(act("clone"), RUNS))
    note, answer = steering.on_event(a.Failed("1", "the disk is full"))
    assert note == a.Note(act("clone"), "refused", "the disk is full") and answer == a.Answer(True, "the disk is full")
    assert said(steering, act("clone", "2")) == ""


@pytest.mark.parametrize(
    "event", [a.CarriedOut("x"), a.Failed("x", "why"), a.CarriedOut("1"), a.Asked(act("stop", "open"), RUNS)]
)
def test_what_cannot_be_true_is_an_error(event: a.Event) -> None:
    steering = a.Steering()
    steering.on_event(a.Restored(act("stop"), "taken"))
    steering.on_event(a.Asked(act("clone", "open"), RUNS))
    with pytest.raises(a.SteeringError):
        steering.on_event(event)


@st.composite
def asking(draw: Any) -> a.Act:
    return act(draw(st.sampled_from(get_args(a.Kind))), str(draw(st.integers(0, 6))), draw(st.sampled_from("tu")))


@given(
    st.lists(
        asking()
        | st.sampled_from([a.ResultCame, a.StopMeant, a.TrialEnded]).flatmap(
            lambda kind: st.sampled_from("tu").map(kind)
        ),
        max_size=30,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_history_makes_only_drawn_changes_and_ends_what_was_taken(history: list[Any]) -> None:
    """A trial that has ended has no act left to happen; an id is carried out once; a taken stop ends each result."""
    steering, ended, carried, last = a.Steering(), set(), [], {}
    stops = set()
    for event in history:
        if isinstance(event, a.Act):
            orders = steering.on_event(a.Asked(event, a.Facts(ended=event.trial in ended)))
            if a.CarryOut(event) in orders:
                carried.append(event.id)
                orders += steering.on_event(a.CarriedOut(event.id, "c" if event.kind == "clone" else ""))
                if event.kind == "stop":
                    stops.add(event.trial)
            assert sum(isinstance(order, a.Answer) for order in orders) == 1
        elif event.trial not in ended:
            orders = steering.on_event(event)
            if isinstance(event, a.TrialEnded):
                ended.add(event.trial)
            elif isinstance(event, a.ResultCame):
                assert (orders == [a.EndTrial(event.trial)]) == (event.trial in stops)
        else:
            continue
        for order in orders:
            if isinstance(order, a.Note):
                before = last.get(order.act.id)
                assert order.state == "asked" if before is None else (before, order.state) in a.STATES
                last[order.act.id] = order.state
                if order.state == "taken":
                    assert order.act.trial not in ended
    assert len(set(carried)) == len(carried)
    for trial in ended:
        assert steering.on_event(a.ResultCame(trial)) == []
