"""What the page gets of a run, by hand and for any run and any moments at which it asks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.report.fold import Fold
from fluidtune.report.occupancy import occupancy_of
from fluidtune.view.run_model import CURVE_POINTS, changes, curve, glance
from tests.report.makers import added, begin, ended, ev, random_run, resized, result, started
from tests.report.test_summary import by_hand
from tests.view.pages import Page


def test_a_run_by_hand() -> None:
    page = Page().take(changes(Fold(by_hand())))
    assert list(page.trials) == ["c", "b", "a"]  # what changed last comes first
    assert page.trials["a"] == {
        **{"number": 0, "name": "", "id": "a", "group": "g", "kind": "elastic", "parameters": {}},
        **{"state": "stopped", "since": 6, "iteration": 1, "target": 10, "metric": 0.9, "record": 0.9, "seconds": 3.0},
        **{"why": "", "waits": "", "iterations": 1, "added": 0, "colour": "#0072B2"},
    }
    assert page.trials["c"]["metric"] == page.trials["c"]["record"] == 0.5
    assert (page.parts["over"], page.parts["now"], page.parts["best"]) == (True, 12, ("c", 0.5))
    # As the summary has it by hand: trial, device, share, start, end.
    of_c = {(2, 1, 1.0, 2, 7), (2, 0, 1.0, 7, 9), (2, 1, 1.0, 7, 9), (2, 1, 1.0, 10, 12)}
    assert set(page.intervals) == {(0, 0, 0.5, 2, 6), (1, 0, 0.5, 2, 6), *of_c}
    assert page.marks == [(7, 1, "grown", ""), (9, 0, "lost", "killed")]
    assert page.parts["devices"] == [[0, "local", None, [[0, 12]]], [1, "local", None, [[0, 12]]]]
    assert page.parts["held"] == [] and page.parts["head"]["metric"] == "loss"
    assert page.parts["news"][0] == [6, "b failed"]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 8), st.integers(1, 20))
def test_what_was_sent_is_not_sent_again(seed: int, devices: int, trials: int) -> None:
    """And the intervals are those of the timeline. (Pieces of a log: tests/view/test_followed_run.py.)"""
    events = random_run(seed, devices=devices, trials=trials, iterations=4)
    fold = Fold(events)
    page = Page().take(changes(fold))
    again = changes(fold, fold.heard)
    assert again["trials"] == [] and not {"head", "devices", "news", "marks", "intervals"} & again.keys()
    numbers = {trial["number"]: name for name, trial in page.trials.items()}
    shown = {(numbers[n], device, start, end) for n, device, _, start, end in page.intervals}
    held = [(device, span) for device, spans in occupancy_of(events).by_device().items() for span in spans]
    assert shown == {(i.trial, device, round(i.start - 1000, 3), round(i.end - 1000, 3)) for device, i in held}


def test_a_curve_is_thinned_and_keeps_the_last_result() -> None:
    count = 3 * CURVE_POINTS + 7
    events = [begin(0, 1), added(0, "a"), started(1, "a", 0)]
    events += [result(2 + n, "a", n, 1.0, 1.0, None if n == count else 1 / n) for n in range(1, count + 1)]
    thinned = curve(Fold(events), "a")
    assert len(thinned["iterations"]) <= CURVE_POINTS
    assert thinned["iterations"][-1] == count and thinned["metric"][-1] is None
    short = curve(Fold(events[:6]), "a")
    assert short["iterations"] == [1, 2, 3] and short["metric"] == [1.0, 0.5, 1 / 3]
    assert curve(Fold(events[:3]), "a")["iterations"] == []


def test_the_width_of_a_trial_over_time() -> None:
    """On half a device, alone on it, on two, without one, and again on one."""
    events = [begin(0, 2), added(0, "a"), added(0, "b"), started(1, "a", 0, share=0.5), started(1, "b", 0, share=0.5)]
    events += [ended(2, "b"), resized(2, "a", 0), started(3, "a", 0)]
    events += [resized(4, "a", 0, 1), ev(6, "trial_suspended", trial="a"), started(8, "a", 1)]
    fold = Fold(events)
    steps = curve(fold, "a")["widths"]
    assert steps == [[1, 0.5], [3, 1.0], [4, 2.0], [6, 0.0], [8, 1.0]]
    fold.step(ended(9, "a"))
    assert curve(fold, "a")["widths"][-1] == [9, 0.0]


def test_why_a_trial_waits() -> None:
    def waits(*events: dict) -> str:
        return Page().take(changes(Fold([begin(0, 1), added(0, "a"), *events]))).trials["a"]["waits"]

    on = started(1, "a", 0)
    busy = ev(0, "trial_waits", line=1, trials=["a"], reason="all are held", why="devices_busy", numbers={})
    assert (waits(busy), waits(busy, on)) == ("all are held", "")
    given = (on, result(2, "a", 1, 1.0, 1.0), ended(2, "a", "paused"), {**added(3, "a"), "parameters": {"lr": 0.2}})
    page = Page().take(changes(Fold([begin(0, 1), added(0, "a"), *given])))
    assert page.trials["a"]["parameters"] == {"lr": 0.2}, "those that the search chose last"
    assert waits(busy, on, begin(5, 1)) == "its driver ended, and another one goes on"


def test_the_best_value_so_far() -> None:
    events = [begin(0, 1, mode="max"), added(0, "a"), started(0, "a", 0)]
    events += [result(n, "a", n, 1.0, 1.0, value) for n, value in enumerate((0.1, 0.5, 0.3, None, 0.6), start=1)]
    fold = Fold(events)
    assert fold.records == [(1, 0.1), (2, 0.5), (5, 0.6)]
    assert fold.trials["a"].best == 0.6 and glance(fold)["best"] == ("a", 0.6)
    assert glance(fold)["use"] == 1.0
