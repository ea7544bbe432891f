"""What the soak's report counts, on made-up results; the soak itself is `make soak`."""

from __future__ import annotations

import pytest

from tests.faults.serving import Response
from tests.faults.soak import JUDGED_S, failed, faults_of, past_commit, shape, unanswered


@pytest.mark.parametrize(
    "ran, restored, expected",
    [
        ([range(1, 7)], [], (0, 0)),
        ([range(1, 6), range(4, 7)], [], (2, 0)),  # from the checkpoint of 3
        ([range(1, 5), [3, 4]], [], (2, 1)),  # the checkpoint of 3 was lost
        ([range(1, 4), [3, 4]], [], (1, 0)),  # 3 had not been reported
        ([range(1, 8), range(1, 5)], [7], (7, 0)),  # a driver that was killed, before Tune's first snapshot
        ([range(1, 9), [1, 2], [1, 2]], [7], (9, 0)),  # its worker went on a little; then a worker died
        ([range(1, 6), range(1, 5), [1, 2]], [5], (7, 2)),
        # It ran iterations again that Tune had heard of, which needs no driver. Seen: they counted as lost.
        ([range(1, 13), [10, 11], range(4, 13)], [13], (10, 0)),
        ([range(1, 6), range(6, 10), range(4, 7)], [5], (3, 3)),  # a restore that repeats nothing excuses no later loss
    ],
)
def test_iterations_that_ran_again_and_those_that_a_checkpoint_held(ran, restored, expected):
    """``ran``: what each process ran, one after the other."""
    assert past_commit([(number, process) for process, numbers in enumerate(ran) for number in numbers], restored) == (
        expected
    )


def test_the_results_of_a_trial_are_each_there_once_and_right():
    rows = [{"training_iteration": number, "value": 1.0 * number} for number in (1, 2, 2, 4, 5, 4)]
    assert faults_of(rows, [1.0, 2.5, 3.0, 4.0, 5.0, 6.0], True) == {"lost": 2, "twice": 1, "wrong": 2}
    assert faults_of(rows, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], False) == {"lost": 1, "twice": 1, "wrong": 0}


def curve(grows: float, seconds: float = 2 * JUDGED_S) -> list[tuple[float, float]]:
    """Every ten seconds; it jumps at first, wobbles, and grows by so much an hour."""
    return [(t, 100 + grows * t / 3600 + (50 if t < 60 else 3 * (t % 20 == 0))) for t in range(0, int(seconds) + 1, 10)]


@pytest.mark.parametrize("grows, flat", [(0.0, True), (4.0, True), (-20.0, True), (20.0, False)])
def test_a_flat_curve_grows_by_a_twentieth_an_hour_at_most(grows, flat):
    found = shape(curve(grows), JUDGED_S)
    assert found["flat"] is flat and found["an_hour"] == pytest.approx(grows, abs=1e-6)


def test_a_short_curve_is_not_judged():
    assert shape(curve(100.0, JUDGED_S), 60.0)["flat"] is None


def test_an_error_counts_unless_the_request_was_on_its_way_when_a_front_died():
    responses = [Response(1.0, 2.0, "error"), Response(9.0, 11.0, "error"), Response(12.0, 13.0, "answered")]
    assert unanswered(responses, [10.0]) == 1
    assert unanswered(responses[1:], [10.0]) == 0


def test_what_must_be_nothing_is_named():
    good = dict.fromkeys(("lost", "twice", "wrong", "past_commit", "requests_without_a_reason"), 0)
    good |= {"requests_wrong": [], "leaks": [], "trouble": [], "curves": {"a": {"flat": None}, "b": {"flat": True}}}
    assert failed(good) == []
    assert failed({**good, "twice": 1, "curves": {"a": {"flat": False}}}) == ["twice", "a"]
