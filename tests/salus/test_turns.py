"""What turns promise whatever happens, with the seats of real trials and with the twin's, which have the same turns."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared_device.twin import TwinSeat, TwinSeats
from salus_share import policy
from salus_share.policies import POLICIES
from salus_share.seat_table import SeatTable
from salus_share.turns import CREDIT_S, IDLE, INSIDE, LINGERING, READY, Turns

#: An iteration takes from this to ten times this, seconds.
SHORTEST = 0.1
#: Under FAIR a trial waits until each other has caught up with its last iteration and its credit, and one turn more.
MOST_TURNS = {"FAIR": int((10 * SHORTEST + CREDIT_S) / SHORTEST) + 2, "PACK": 1}


@pytest.mark.parametrize("name", POLICIES)
def test_a_lane_is_one_trials_at_a_time_and_is_not_free_while_others_wait(name: str, directory: Path) -> None:
    """Trials come, iterate and leave at random. No trial gets more turns while another waits than its policy allows.

    The twin's seats, which get the same calls, have the same turns, charges and lingering at each moment.
    """
    draw, now, most, count = random.Random(name), 0.0, MOST_TURNS.get(name), 0
    table, twins = SeatTable.create(directory, name), TwinSeats()
    sides: list[Turns[Any]] = [Turns(policy(name), table), Turns(policy(name), twins)]
    waiting = dict[int, Counter[int]]()

    def both(method: str, *given: Any) -> None:
        ours, theirs = (getattr(side, method)(*given) for side in sides)
        # Of those that wait for a lane that is kept, any may be woken.
        assert ours == theirs or (method == "end_iteration" and None not in (ours, theirs))

    for _ in range(5000):
        states = {seat.index: seat.state for seat in table.seats()}
        idle = [index for index, state in states.items() if state in (IDLE, LINGERING)]
        inside = [index for index, state in states.items() if state == INSIDE]
        what = draw.choice(["come"] * (len(states) < 8) + ["arrive"] * 6 * bool(idle) + ["end"] * 6 * bool(inside))
        what = "leave" if states and draw.random() < 0.05 else what
        index = draw.choice({"arrive": idle, "end": inside}.get(what, list(states) or [0]))
        if what == "come":
            seat = table.free_seat("a trial")
            both("level", seat.index, 0)
            seat.last_turn, seat.service = sides[0].level(seat.index, 0)
            seat.state, seat.lane, seat.remaining, seat.rung = IDLE, 0, draw.uniform(0, 100), draw.randint(0, 3)
            table.write(seat)
            twins.put(seat.index, TwinSeat(0, 0, seat.standing))  # type: ignore[arg-type]
        elif what == "leave":
            waiting.pop(index, None)
            both("leave", index, now)
            twins.remove(index)  # type: ignore[arg-type]
        elif what == "end":
            both("end_iteration", index, 0, draw.uniform(SHORTEST, 10 * SHORTEST), now)
        if what == "arrive" or (what == "end" and draw.random() < 0.7):  # at once, before another one looks
            waiting[index] = Counter()
            both("arrive", index, 0, now)
        now += draw.choice([0.002, 1.0])
        both("kept_until", 0, now)
        now += 1.0  # for longer no lane is kept
        both("grant", 0, now)
        seats = {seat.index: seat for seat in table.seats()}
        assert [(each.state, each.standing, each.last_s) for each in seats.values()] == [
            (twin.state, twin.standing, twin.last_s)
            for twin in (twins.seat(index) for index in seats)  # type: ignore[arg-type]
        ]
        states = {index: seat.state for index, seat in seats.items()}
        runs = [index for index, state in states.items() if state == INSIDE]
        assert len(runs) <= 1 and (runs or READY not in states.values())
        if runs and (what == "end" or runs != inside):
            count += 1
            waiting.pop(runs[0], None)
            for counted in waiting.values():
                counted[runs[0]] += 1
                assert most is None or counted[runs[0]] <= most, "another one starves"
    assert count > 1000
