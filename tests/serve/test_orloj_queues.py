"""The contract of `Pending` for it and the other two of the benchmarks, and the work that each does."""

import random

import pytest

from benchmarks.orloj_hull import HullPending
from benchmarks.orloj_naive import NaivePending
from symphony_serve.batching.orloj_queues import Pending
from tests.serve.orloj_operations import RATES, run_beside_the_oracle, times
from tests.serve.test_work import lines


@pytest.fixture(params=[NaivePending, Pending, HullPending])
def kind(request: pytest.FixtureRequest) -> type[Pending]:
    return request.param


def take(pending: Pending, size: int, now: float) -> list[int]:
    chosen = pending.best(size, now)
    for number in chosen:
        pending.remove(number)
    return chosen


class TestContract:
    def test_the_highest_scores_are_taken_and_leave(self, kind: type[Pending]) -> None:
        pending = kind(times(1), 0.1)
        for number, deadline in enumerate((0.3, 0.2, 5.0, 0.21, 0.2)):
            pending.insert(deadline, number)
        assert pending.count(2, 0.0) == 5 and pending.earliest(2, 0.0) == (0.2, 1)
        # All end in time for certain, so the earliest deadlines are best, of equal ones the smaller number.
        assert take(pending, 4, 0.0) == [1, 4, 3, 0]
        assert len(pending) == 1 and 2 in pending and 1 not in pending
        assert take(pending, 4, 0.0) == [2] and len(pending) == 0 and pending.earliest(1, 0.0) is None
        assert take(pending, 1, 0.0) == []

    def test_a_late_one_is_not_taken_for_a_size_and_then_for_none(self, kind: type[Pending]) -> None:
        given = times(2)
        pending = kind(given, 0.1)
        pending.insert(given[1].mean, 0)
        pending.insert(given[8].mean, 1)
        assert [pending.count(size, 0.0) for size in given] == [2, 1, 1, 1]
        assert pending.late(0.0) == [] and pending.best(8, 0.0) == [1]
        later = 1e-6
        assert [pending.count(size, later) for size in given] == [1, 1, 1, 0]
        assert pending.late(later) == [0] and pending.best(8, later) == []
        assert pending.best(4, later) == [1] and len(pending) == 1

    def test_no_overflow_after_years(self, kind: type[Pending]) -> None:
        """exp(b t) passes the largest float after 7,098 s."""
        pending = kind(times(1), 0.1)
        for number, now in enumerate((0.0, 1e4, 1e8)):
            pending.insert(now + 0.3, 10 * number)
            pending.insert(now + 0.2, 10 * number + 1)
            pending.late(now)
            assert take(pending, 1, now) == [10 * number + 1]
            assert take(pending, 1, now) == [10 * number]


@pytest.mark.parametrize("kind", [Pending, HullPending])
@pytest.mark.parametrize("b", RATES)
def test_as_the_oracle(kind: type[Pending], b: float) -> None:
    run_beside_the_oracle(kind, seed=5, operations=150, b=b, most=40)


@pytest.mark.parametrize("size", [1, 16])
def test_the_work_does_not_grow_with_what_waits(size: int) -> None:
    """A step for each interval of the score and for each request that is taken."""

    def work(count: int) -> int:
        pending = Pending(times(1, sizes=(size,)), 0.1)
        rng = random.Random(1)
        for number in range(count):
            pending.insert(rng.uniform(0.05, 2.0), number)
        return lines(lambda: pending.best(size, 0.0))

    assert 0 < work(10_000) <= 1.1 * work(1000)
