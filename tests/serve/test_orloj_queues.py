"""`Pending` and the hulls of the benchmarks beside the oracle, and the work of `Pending`."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.orloj_hull import HullPending
from benchmarks.orloj_naive import NaivePending, score
from benchmarks.orloj_profiles import BatchMap, VaryingProfile
from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.batching.orloj_queues import Pending
from tests.serve.test_work import lines

#: Rates of the anticipated delay, per second: those of figure 4.13 are 1e-3 to 100.
RATES = (1e-3, 0.1, 10.0, 100.0)


def times(seed: int, sizes: tuple[int, ...] = (1, 2, 4, 8), bins: int = 20) -> dict[int, Histogram]:
    """Batch times of requests of 50 to 110 ms with some empty bins."""
    rng = random.Random(seed)
    edges = tuple(0.05 + 0.06 * i / bins for i in range(bins + 1))
    masses = tuple(rng.random() if rng.random() < 0.7 else 0.0 for _ in range(bins - 1))
    batches = BatchMap({size: (0.0, 1 + 0.15 * (size - 1)) for size in sizes})
    return dict(VaryingProfile(batches, {"": Histogram(edges, (*masses, 1.0))}).times)


def scored(pending: Pending, number: int, size: int, now: float) -> float:
    """The score of a pending request by its definition."""
    return score(pending.times[size], pending.deadlines[number] - now, pending.b)


@pytest.mark.parametrize("kind", [Pending, HullPending])
@pytest.mark.parametrize("b", RATES)
def test_as_the_oracle(kind: type[Pending], b: float) -> None:
    """Insert, remove and take on ``kind`` and on `NaivePending`, about 40 requests at once.

    Both have the same counts, heads and late ones, and what is taken has the same scores.
    """
    rng, given = random.Random(5), times(5)
    ours, oracle = kind(given, b), NaivePending(given, b)
    now = 1e6 * rng.random()
    for number in range(150):
        now += rng.expovariate(1) * 0.002
        if rng.random() < 40 / (40 + len(oracle)):
            # Deadlines on a grid, so that several are equal.
            deadline = round(now, 3) + rng.randint(40, 1000) / 2000
            ours.insert(deadline, number)
            oracle.insert(deadline, number)
        elif rng.random() < 0.3 and len(oracle):
            gone = rng.choice(list(oracle.deadlines))
            ours.remove(gone)
            oracle.remove(gone)
        else:
            size = rng.choice(list(given))
            assert ours.late(now) == oracle.late(now)
            assert ours.count(size, now) == oracle.count(size, now)
            assert ours.earliest(size, now) == oracle.earliest(size, now)
            chosen, wanted = ours.best(size, now), oracle.best(size, now)
            assert len(set(chosen)) == len(wanted)
            found = [scored(oracle, one, size, now) for one in chosen]
            for one, other in zip(found, [scored(oracle, other, size, now) for other in wanted], strict=True):
                assert math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12), (size, now, one, other)
            for one in chosen:
                ours.remove(one)
                oracle.remove(one)


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
