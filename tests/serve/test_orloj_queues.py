"""`Pending` and the hulls of the benchmarks beside the oracle, and the work of `Pending`."""

import random

import pytest

from benchmarks.orloj_hull import HullPending
from symphony_serve.batching.orloj_queues import Pending
from tests.serve.orloj_operations import RATES, run_beside_the_oracle, times
from tests.serve.test_work import lines


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
