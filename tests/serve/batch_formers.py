"""The contract of a `BatchFormer`, as tests. A former's test class inherits it and defines the fixture ``make``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from symphony_serve.batching import BatchFormer
from symphony_serve.errors import ServeError
from symphony_serve.messages import Reason, Request
from tests.serve.invariants import check_former

#: Makes a former of a model whose batches of 1, 2, 3 and so on always take these seconds. The requests of the tests
#: have deadlines about 12 s after they come.
MakeFormer = Callable[[Sequence[float]], BatchFormer]

#: l(b) = b + 5 for batches of up to 6 (figure 4's model).
SECONDS = [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
SEEDS = range(20)


def request(number: int, deadline: float, arrival: float = 0.0) -> Request:
    """A request of the model ``m``."""
    return Request(number, "m", arrival, deadline)


def entries(one: object, seen: set[int] | None = None) -> int:
    """How many entries the lists, dicts and sets have that a former is made of."""
    seen = set[int]() if seen is None else seen
    if id(one) in seen or isinstance(one, Request):
        return 0
    seen.add(id(one))
    if isinstance(one, dict):
        return len(one) + sum(entries(value, seen) for value in one.values())
    if isinstance(one, list | tuple | set):
        return len(one) + sum(entries(value, seen) for value in one)
    return sum(entries(value, seen) for value in vars(one).values()) if hasattr(one, "__dict__") else 0


class BatchFormerContract:
    """Set ``by_deadline`` to False if a batch need not have the earliest of the deadlines that are feasible."""

    by_deadline = True

    def test_a_request_alone_is_a_batch_of_one(self, make: MakeFormer) -> None:
        former = make(SECONDS)
        only = request(1, 12.0)
        former.add(only)
        candidate = former.form(1.0)
        assert candidate is not None
        assert (candidate.size, candidate.deadline, candidate.seconds) == (1, 12.0, 6.0)
        assert candidate.next_seconds >= candidate.seconds
        assert former.take() == (only,)
        assert len(former) == 0
        assert former.form(1.0) is None

    def test_a_batch_that_starts_at_the_last_moment_is_in_time(self, make: MakeFormer) -> None:
        """Also where the sums of times are rounded: the moment is computed as the caller computes it."""
        for seed in SEEDS:
            rng = random.Random(seed)
            former = make([rng.uniform(5.0, 6.0)])
            former.add(request(1, rng.uniform(11.0, 12.0)))
            candidate = former.form(0.0)
            assert candidate is not None
            latest = candidate.deadline - candidate.seconds
            assert former.form(latest) == candidate
            assert former.form(math.nextafter(latest, math.inf)) is None
            assert len(former) == 0

    def test_what_comes_too_late_is_refused_as_late(self, make: MakeFormer) -> None:
        former = make(SECONDS)
        for number in range(3):
            former.add(request(number, 12.0))
        assert former.form(6.5) is None
        assert [(told.request.id, told.reason) for told in former.refused()] == [(n, Reason.LATE) for n in range(3)]
        assert list(former.refused()) == []
        assert len(former) == 0

    @pytest.mark.parametrize("deadline", [math.nan, math.inf, -math.inf])
    def test_a_deadline_that_is_no_time_is_refused(self, make: MakeFormer, deadline: float) -> None:
        former = make(SECONDS)
        former.add(request(1, 30.0))
        with pytest.raises(ServeError, match=f"request 2 has the deadline {deadline} s"):
            former.add(request(2, deadline))
        assert [waiting.id for waiting in former.waiting()] == [1]
        check_former(former)

    def test_a_deadline_before_the_arrival_is_too_near_or_late(self, make: MakeFormer) -> None:
        former = make(SECONDS)
        former.add(request(1, 5.0, arrival=10.0))
        assert former.form(10.0) is None
        (told,) = former.refused()
        assert told.request.id == 1 and told.reason in (Reason.LATE, Reason.LATE_ON_ARRIVAL)

    def test_what_was_refused_is_not_kept_though_no_batch_is_taken(self, make: MakeFormer) -> None:
        """A thousandth of the requests wait at a time."""
        former, now = make(SECONDS), 0.0
        for number in range(10_000):
            now += 1.0
            former.add(request(number, now + 12.0, now))
            former.form(now)
            former.refused()
        assert 0 < len(former) < 20
        check_former(former)
        assert entries(former) < 1000
        former.form(now + 100.0)
        assert len(former) == 0 and len(former.refused()) > 0
        check_former(former)
        assert entries(former) < 1000

    def test_requests_neither_vanish_nor_appear_twice_and_wait_in_the_order_of_deadlines_and_ids(
        self, make: MakeFormer
    ) -> None:
        """Requests come, are removed and taken at random moments; every batch is in time, and as large as measured."""
        for seed in SEEDS:
            self._run(make(SECONDS), random.Random(seed))

    def _run(self, former: BatchFormer, rng: random.Random) -> None:
        now, left, gone, largest = 0.0, dict[int, float](), set[int](), 0
        former.set_rate(rng.choice([0.1, 1.0, 10.0]))
        for number in range(300):
            now += rng.choice([0.0, 0.1, 1.0, 3.0])
            step = rng.random()
            if step < 0.7:
                deadline = now + rng.choice([3.0, 9.0, 12.0, rng.uniform(6.0, 20.0)])
                former.add(request(number, deadline, now))
                left[number] = deadline
            elif step < 0.75 and left:
                chosen = rng.choice(sorted(left))
                assert [one and one.id for one in (former.remove(chosen), former.remove(chosen))] == [chosen, None]
                del left[chosen]
                gone.add(chosen)
            candidate = former.form(now)
            check_former(former)
            leaving = [told.request.id for told in former.refused()]
            if candidate is not None:
                assert now <= candidate.deadline - candidate.seconds
                assert former.form(now) == candidate
                assert now <= former.changes_at()
                largest = max(largest, candidate.size)
                if rng.random() < 0.3:
                    taken = former.take()
                    assert len(taken) == candidate.size
                    earliest = min(one.deadline for one in taken)
                    assert earliest == candidate.deadline if self.by_deadline else earliest >= candidate.deadline
                    leaving += [one.id for one in taken]
            assert len(set(leaving)) == len(leaving) and left.keys() >= set(leaving)
            for one in leaving:
                del left[one]
            gone.update(leaving)
            assert [waiting.id for waiting in former.waiting()] == sorted(left, key=lambda one: (left[one], one))
            assert len(former) == len(left)
        assert gone and 1 < largest <= len(SECONDS)
