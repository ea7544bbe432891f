"""The lane table: algorithm 2.1 line by line, and the safety condition whatever happens."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from salus_share import Lane, LaneTable, Need, SalusError
from salus_share.lanes import outgrown, oversized


def table(capacity, *jobs, **options):
    made = LaneTable(capacity, **options)
    for name, persistent, ephemeral in jobs:
        assert made.admit(name, persistent, ephemeral) is not None
    return made


def test_step_3_grows_the_smallest_lane_that_helps() -> None:
    made = table(100, ("a", 10, 15), ("b", 10, 30))
    # A new lane does not fit (65 + 5 + 40), none is that large; lane 0 would grow to 40: 20 + 5 + 30 + 40 fits.
    assert made.admit("c", 5, 40) == 0
    assert made.lanes == {0: Lane(40, ("a", "c")), 1: Lane(30, ("b",))}
    made = table(100, ("a", 10, 15), ("b", 10, 30))
    # Growing the smallest takes 20 + 5 + 30 + 55; growing the other 20 + 5 + 15 + 55.
    assert made.admit("c", 5, 55) == 1


def test_one_lane_only() -> None:
    made = table(100, ("a", 10, 20), ("b", 10, 40), max_lanes=1)
    assert made.lanes == {0: Lane(40, ("a", "b"))}
    with pytest.raises(SalusError, match="max_lanes"):
        LaneTable(10, max_lanes=0)


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "5", None, True])
def test_numbers_that_are_none(bad) -> None:
    with pytest.raises(SalusError, match="capacity"):
        LaneTable(bad)
    made = LaneTable(10)
    with pytest.raises(SalusError, match="persistent memory of 'a'"):
        made.admit("a", bad, 1)
    with pytest.raises(SalusError, match="ephemeral memory of 'a'"):
        made.admit("a", 1, bad)
    assert made.reserved == 0
    assert made.lanes == {}


def test_wrong_calls() -> None:
    made = table(10, ("a", 1, 1))
    with pytest.raises(SalusError, match="already"):
        made.admit("a", 1, 1)
    for call in (made.release, lambda job: made.change(job, 1, 1)):
        with pytest.raises(SalusError, match="not on this device"):
            call("b")


def test_fractions_of_a_byte_do_not_pile_up() -> None:
    made = LaneTable(1.0)
    for index in range(10):
        assert made.admit(str(index), 0.1, 0) is (None if index == 9 else index)
    # Ten times the float 0.1 is more than 1; nine times is not.
    assert made.reserved == 9 * Fraction(0.1) <= 1


def test_more_is_promised_before_it_runs_out_and_far_too_much_is_given_back() -> None:
    promised = Need(330, 1100)  # a tenth more than 300 and 1000
    assert not outgrown(promised, Need(330, 1144)) and not oversized(promised, Need(330, 1144))
    assert outgrown(promised, Need(330, 1166)) and outgrown(promised, Need(352, 990))
    assert oversized(Need(200, 800), Need(22, 110)) and not outgrown(Need(200, 800), Need(22, 110))


class Tables(RuleBasedStateMachine):
    """Any order of admit, change and release; the books are kept a second time, by their definition."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LaneTable(64)
        self.needs: dict[str, tuple[int, int]] = {}
        self.lane: dict[str, int] = {}
        self.count = 0

    sizes = st.integers(0, 40)

    @rule(p=sizes, e=sizes)
    def admit(self, p: int, e: int) -> None:
        self.count += 1
        name = f"j{self.count}"
        found = self.table.find(p, e)
        lane = self.table.admit(name, p, e)
        assert found == lane
        if lane is None:
            largest = [max(self.needs[j][1] for j in jobs) for jobs in self.jobs_by_lane().values()]
            # Neither a lane of its own, nor any lane grown to hold it.
            assert all(self.reserved() + p + max(e, size) - size > 64 for size in [0, *largest])
        else:
            self.needs[name], self.lane[name] = (p, e), lane

    @precondition(lambda self: self.needs)
    @rule(data=st.data(), p=sizes, e=sizes)
    def change(self, data: st.DataObject, p: int, e: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.needs)))
        lane = self.table.change(name, p, e)
        if lane is not None:
            self.needs[name], self.lane[name] = (p, e), lane

    @precondition(lambda self: self.needs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.needs)))
        self.table.release(name)
        del self.needs[name], self.lane[name]

    def jobs_by_lane(self) -> dict[int, list[str]]:
        lanes: dict[int, list[str]] = {}
        for job, lane in self.lane.items():
            lanes.setdefault(lane, []).append(job)
        return lanes

    def reserved(self) -> int:
        lanes = self.jobs_by_lane().values()
        return sum(p for p, _ in self.needs.values()) + sum(max(self.needs[j][1] for j in jobs) for jobs in lanes)

    @invariant()
    def safety_condition(self) -> None:
        assert self.table.reserved == self.reserved() <= 64
        lanes = {i: (lane.size, set(lane.jobs)) for i, lane in self.table.lanes.items()}
        assert lanes == {i: (max(self.needs[j][1] for j in js), set(js)) for i, js in self.jobs_by_lane().items()}


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
