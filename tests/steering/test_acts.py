"""What becomes of an act, without Tune: golden examples, and any events in any order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.steering import acts as a
from tests.drawings import changes_of

RUNS = a.Facts(parameters={"lr": "a number", "net/depth": "a number", "act": "text", "fn": ""}, has_checkpoint=False)


def act(kind: Any, name: str = "1", trial: str = "t", **more: Any) -> a.Act:
    return a.Act(name, kind, trial, "ann", "command line", **more)


def said(steering: a.Steering, asked: a.Act, facts: a.Facts = RUNS) -> str:
    """What an act is refused with; "" if it is taken."""
    first, *refused = steering.asked(asked, facts)
    assert first == asked
    if not refused:
        done = steering.carried_out(asked.id, "new" if asked.kind == "clone" else "")
        assert done.state in ("taken", "done") and done == steering.acts[asked.id]
        return ""
    assert refused == [replace(asked, state="refused", why=refused[0].words)]
    return refused[0].words


def test_the_diagram_shows_exactly_the_changes_of_the_code() -> None:
    drawn = changes_of("view.md", "## How an act goes")
    assert drawn == {(*pair, cause) for pair, causes in a.STATES.items() for cause in causes.split(", ")}
    assert {state for pair in a.STATES for state in pair} == set(get_args(a.State))
    assert all(hasattr(a.Steering, cause) for *_, cause in drawn)


def test_a_kept_trial_goes_on_once_the_algorithm_wants_to_stop_it() -> None:
    steering = a.Steering()
    assert steering.stop_meant("t") is None
    assert said(steering, act("keep")) == ""
    assert not steering.goes_on_alone("t")
    kept = steering.stop_meant("t")
    assert kept is not None and (kept.kind, kept.state) == ("keep", "done")
    assert steering.goes_on_alone("t") and not steering.goes_on_alone("u")
    # It can still be stopped, and then it ends.
    assert said(steering, act("stop", "2")) == ""
    assert steering.stops == {"t"}
    assert steering.ended("t") == [act("stop", "2", state="done")] and steering.stops == set()


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
    assert steering.asked(clone, RUNS) == []  # a double click: one id
    assert steering.acts["1"].words == "trial new is a clone of trial t"
    assert said(steering, act("stop", "2")) == ""
    assert "ann has asked for that (command line)" in said(steering, act("stop", "3"))
    assert "ends at its next result" in said(steering, act("keep", "4"))
    assert said(steering, act("clone", "5"), a.Facts(ended=True)) == "", "one that has ended can be cloned"


def test_what_an_earlier_driver_has_saved_holds() -> None:
    steering = a.Steering()
    clone = act("clone", "3", clone="c", state="done")
    for each in (act("stop", "1", state="taken"), act("keep", "2", "u", state="done"), clone):
        steering.restored(each)
    assert steering.stops == {"t"}
    assert steering.goes_on_alone("u")
    assert steering.asked(act("clone", "3"), RUNS) == [] and steering.acts["3"] == clone


def test_a_clone_that_cannot_be_made_is_refused_and_can_be_asked_for_again() -> None:
    steering = a.Steering()
    steering.asked(act("clone"), RUNS)
    failed = steering.failed("1", "the disk is full")
    assert (failed.state, failed.words) == ("refused", "the disk is full")
    assert said(steering, act("clone", "2")) == ""


def test_what_cannot_be_true_is_an_error() -> None:
    steering = a.Steering()
    steering.restored(act("stop", state="taken"))
    steering.asked(act("clone", "open"), RUNS)
    for event in (lambda: steering.carried_out("x"), lambda: steering.failed("x", "why"), lambda: said(steering, OPEN)):
        with pytest.raises(RuntimeError, match=r"cannot make|asked for again"):
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
            changed = steering.asked(event, a.Facts(ended=event.trial in ended))
            if steering.acts[event.id].state == "asked":
                carried.append(event.id)
                changed.append(steering.carried_out(event.id, "c" if event.kind == "clone" else ""))
                if event.kind == "stop":
                    stops.add(event.trial)
            assert steering.acts[event.id].words
        elif event[1] in ended:
            continue
        elif event[0] == "ended":
            ended.add(event[1])
            changed = steering.ended(event[1])
        else:
            changed = list(filter(None, [steering.stop_meant(event[1])]))
        assert steering.stops == stops - ended
        for each in changed:
            before = last.get(each.id)
            assert each.state == "asked" if before is None else (before, each.state) in a.STATES
            last[each.id] = each.state
            if each.state == "taken":
                assert each.trial not in ended
    assert len(set(carried)) == len(carried)
