"""Policies by name, one of a user's own, the order in which each puts jobs, and what it promises whatever happens."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from salus_share import Policy, SalusError, policy
from salus_share.policies import POLICIES, Standing
from salus_share.seat_table import SeatTable
from salus_share.turns import CREDIT_S, IDLE, INSIDE, LINGERING, READY, Turns, credited, next_turn, served

JOBS = {
    "first": Standing(1, service=5.0, last_turn=8, remaining=50.0),
    "short": Standing(2, service=9.0, last_turn=9, remaining=1.0),
    "unknown": Standing(3, service=7.0, last_turn=3),
    "poor": Standing(4, service=2.0, last_turn=7, remaining=60.0),
    "promoted": Standing(5, service=8.0, last_turn=6, remaining=70.0, rung=1),
}


class Last(Policy):
    """The job that arrived last goes first."""

    name = "last"

    def turn(self, job):
        return (-job.arrival,)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("FIFO", ["first", "short", "unknown", "poor", "promoted"]),
        ("PACK", ["unknown", "promoted", "poor", "first", "short"]),
        ("SRTF", ["short", "first", "poor", "promoted", "unknown"]),
        ("FAIR", ["poor", "first", "unknown", "promoted", "short"]),
        ("HPT", ["promoted", "poor", "first", "unknown", "short"]),
        (f"{__name__}:Last", ["promoted", "poor", "unknown", "short", "first"]),
    ],
)
def test_turns(name, order) -> None:
    left, found = dict(JOBS), []
    while left:
        found.append(next_turn(policy(name), left))
        del left[found[-1]]
    assert found == order
    assert next_turn(policy(name), {}) is None


@pytest.mark.parametrize("name", ["fair", "", "nosuchmodule:X", "math:nosuch", "math:floor", "builtins:dict"])
def test_no_policy(name) -> None:
    with pytest.raises(SalusError, match="policy"):
        policy(name)


def test_what_an_iteration_changes() -> None:
    assert served(Standing(1, 2.0, 3, 1.5), 1.0, 9) == Standing(1, 3.0, 9, 0.5)
    assert served(Standing(1, remaining=0.5), 1.0, 9).remaining == 0.0
    assert served(Standing(1), 1.0, 9).remaining is None


def test_credit_is_bounded() -> None:
    assert credited(2.0, 50.0) == 49.0
    assert credited(49.5, 50.0) == 49.5
    assert credited(60.0, 50.0) == 60.0


#: An iteration takes from this to ten times this, seconds.
SHORTEST = 0.1
#: Under FAIR a trial waits until each other has caught up with its last iteration and its credit, and one turn more.
MOST_TURNS = {"FAIR": int((10 * SHORTEST + CREDIT_S) / SHORTEST) + 2, "PACK": 1}


@pytest.mark.parametrize("name", POLICIES)
def test_a_lane_is_one_trials_at_a_time_and_is_not_free_while_others_wait(name: str, directory: Path) -> None:
    """Trials come, iterate and leave at random. No trial gets more turns while another waits than its policy allows."""
    draw, now, most, count = random.Random(name), 0.0, MOST_TURNS.get(name), 0
    table = SeatTable.create(directory, name)
    turns, waiting = Turns(policy(name), table), dict[int, Counter[int]]()
    for _ in range(5000):
        states = {seat.index: seat.state for seat in table.seats()}
        idle = [index for index, state in states.items() if state in (IDLE, LINGERING)]
        inside = [index for index, state in states.items() if state == INSIDE]
        what = draw.choice(["come"] * (len(states) < 8) + ["arrive"] * 6 * bool(idle) + ["end"] * 6 * bool(inside))
        what = "leave" if states and draw.random() < 0.05 else what
        index = draw.choice({"arrive": idle, "end": inside}.get(what, list(states) or [0]))
        if what == "come":
            seat = table.free_seat("a trial")
            seat.last_turn, seat.service = turns.level(seat.index, 0)
            seat.state, seat.lane, seat.remaining, seat.rung = IDLE, 0, draw.uniform(0, 100), draw.randint(0, 3)
            table.write(seat)
        elif what == "leave":
            waiting.pop(index, None)
            turns.leave(index, now)
        elif what == "end":
            turns.end_iteration(index, 0, draw.uniform(SHORTEST, 10 * SHORTEST), now)
        if what == "arrive" or (what == "end" and draw.random() < 0.7):  # at once, before another one looks
            waiting[index] = Counter()
            turns.arrive(index, 0, now)
        now += 1.0  # for longer no lane is kept
        turns.grant(0, now)
        states = {seat.index: seat.state for seat in table.seats()}
        runs = [index for index, state in states.items() if state == INSIDE]
        assert len(runs) <= 1 and (runs or READY not in states.values())
        if runs and (what == "end" or runs != inside):
            count += 1
            waiting.pop(runs[0], None)
            for counted in waiting.values():
                counted[runs[0]] += 1
                assert most is None or counted[runs[0]] <= most, "another one starves"
    assert count > 1000
