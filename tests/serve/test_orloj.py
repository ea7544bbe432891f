"""The parts of the former Orloj: times, scores and queues beside their definitions, and what is learned of sources."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.orloj_hull import HullPending
from benchmarks.orloj_naive import NaivePending, score
from benchmarks.orloj_product import largest_of_each
from benchmarks.orloj_profiles import BatchMap, VaryingProfile, cdf, cdf_before, largest, mixture, point
from symphony_serve.batching.orloj import Orloj
from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.batching.orloj_learned import ENOUGH, MOST_SOURCES, LearnedTimes
from symphony_serve.batching.orloj_queues import Pending
from symphony_serve.batching.orloj_scores import ScoreTable
from symphony_serve.messages import BatchTook, Request
from symphony_serve.model_side import Batching, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.seen_times import RECENT
from tests.serve.invariants import check_former
from tests.serve.test_work import lines

#: Golden 3: one bin [10, 20), E[L] = 15.
TIME = Histogram((10.0, 20.0), (1.0,))
TEN, FIVE_OR_FIFTEEN = point(10.0), mixture([point(5.0), point(15.0)])
#: Rates of the anticipated delay, per second: those of figure 4.13 are 1e-3 to 100.
RATES = (1e-3, 0.1, 10.0, 100.0)


def histograms(bins: int = 6) -> st.SearchStrategy[Histogram]:
    widths = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=bins)
    return widths.flatmap(
        lambda given: st.builds(
            lambda start, masses: Histogram(tuple(itertools.accumulate(given, initial=start)), tuple(masses)),
            st.floats(0.0, 10.0),
            st.lists(st.floats(0.0, 1.0), min_size=len(given), max_size=len(given)).filter(lambda all: sum(all) > 0.01),
        )
    )


@pytest.mark.parametrize(
    "found, masses, mean",
    [
        (largest(mixture([TEN, FIVE_OR_FIFTEEN]), 2), [1 / 16, 8 / 16, 7 / 16], 11.875),
        (largest_of_each([TEN, FIVE_OR_FIFTEEN]), [0, 1 / 2, 1 / 2], 12.5),
    ],
    ids=["random places", "one of each"],
)
def test_golden_1(found: Histogram, masses: list[float], mean: float) -> None:
    """A is always 10, B is 5 or 15: L of two is 5, 10 or 15."""
    near = [cdf(found, value + 0.1) - cdf(found, value - 0.1) for value in (5, 10, 15)]
    assert near == pytest.approx(masses, abs=1e-12)
    assert found.mean == pytest.approx(mean, rel=1e-15)


def test_golden_2_the_mean_is_not_that_of_the_middles_of_bins() -> None:
    found = largest(Histogram((0.0, 5.0, 10.0), (1.0, 1.0)), 2)
    assert found.masses == (0.25, 0.75)
    assert found.mean == pytest.approx(20 / 3, rel=1e-12)
    assert Histogram(found.edges, found.masses).mean == pytest.approx(6.25)


def test_samples_fill_bins_of_equal_width_and_empty_ones_are_merged() -> None:
    histogram = Histogram.of_samples([10, 11, 12, 19, 30])
    assert histogram.edges == (10, 11, 12, 13, 19, 20, 29, 30)
    assert histogram.masses == pytest.approx((1 / 5, 1 / 5, 1 / 5, 0, 1 / 5, 0, 1 / 5))
    rng = random.Random(1)
    assert len(Histogram.of_samples(rng.uniform(1, 2) for _ in range(5000)).masses) == 20


def test_one_value_is_exact() -> None:
    """So a batch that takes exactly the slack is in time."""
    for histogram in (point(75.0), Histogram.of_samples([75.0, 75.0])):
        assert histogram == Histogram((75.0, 75.0), (1.0,))
        assert histogram.mean == largest(histogram, 16).mean == 75.0
        assert (cdf_before(histogram, 75.0), cdf(histogram, 75.0)) == (0.0, 1.0)


def by_table(time: Histogram, slack: float, b: float) -> float:
    table = ScoreTable.of(time, b)
    return table.within(table.interval(slack), slack)


@pytest.mark.parametrize(
    "b, slack, wanted",
    [
        (0.1, 40, 0.00570321),
        (0.1, 20, 0.0421414),
        (0.1, 15, 0.0262313),
        (0.1, 10, 0.0),
        (0.1, 5, 0.0),
        (1e-4, 40, 0.0665002),
        (1e-4, 20, 0.0666333),
        (1e-4, 15, 0.0333250),
        (0.1, 1e7, 0.0),
    ],
)
def test_golden_3(b: float, slack: float, wanted: float) -> None:
    assert score(TIME, slack, b) == pytest.approx(wanted, rel=1e-5)
    assert by_table(TIME, slack, b) == pytest.approx(wanted, rel=1e-5)


@given(histograms(), st.floats(-5, 60), st.floats(-6, 2).map(lambda exponent: 10**exponent), st.integers(1, 16))
@settings(max_examples=50, deadline=None)
def test_the_table_is_the_score(histogram: Histogram, slack: float, b: float, k: int) -> None:
    time = largest(histogram, k)
    assert by_table(time, slack, b) == pytest.approx(score(time, slack, b), rel=1e-6, abs=1e-12)


def test_values_of_single_times_are_steps_of_the_score() -> None:
    """Times of 1 and 3 or 4, and between 1 and 2; at a single time the score has what comes with it."""
    time = Histogram((1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 4.0), (1.0, 1.0, 0.0, 1.0, 0.0, 1.0))
    for slack in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0):
        assert by_table(time, slack, 0.2) == pytest.approx(score(time, slack, 0.2), rel=1e-12)


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


# What is learned of the times of sources, and when a model's requests change over to the other former.

FIRST = Profile.linear(0.001, 0.004, 16)


def learned(batches: int = 400) -> LearnedTimes:
    """Requests of "short" take what the profile says, of "long" five times that. Batches of over 3 take twice that."""
    rng, times = random.Random(1), LearnedTimes(FIRST, 10.0)
    for _ in range(batches):
        kind, size = rng.choice(["short", "long", "both"]), rng.randint(2, 16)
        sources = ["short", "long"] * size if kind == "both" else [kind] * size
        stretch = rng.uniform(0.9, 1.1) * (1.0 if kind == "short" else 5.0)
        times.add(sources[:size], stretch * (2.0 if size > 3 else 1.0))
        if times.due(0.01):
            times.profiles()
    return times


def test_levels_of_sources_and_factors_of_sizes_are_told_apart() -> None:
    short, both = learned().profiles()
    assert short.sources == {"short"} and both.sources == {"short", "long"}
    for profile, level in ((short, 1.0), (both, 5.0)):
        for size, factor in ((2, 1.0), (4, 2.0), (16, 2.0)):
            assert profile.times[size].mean == pytest.approx(level * factor * FIRST.seconds(size), rel=0.05)
    assert learned().profiles(wait=0.2)[1].times[2].mean == pytest.approx(0.2 + both.times[2].mean)


def test_a_source_is_tried_alone_before_it_is_known() -> None:
    times = learned()
    for _ in range(ENOUGH):
        times.add(["new", "long"], 5.0)
    new, short, _ = times.profiles()
    assert new.sources == {"new"} and new.times == short.times
    times.add(["new"], 20.0)
    assert [sorted(profile.sources)[-1] for profile in times.profiles()] == ["short", "short", "short"]
    assert times.profiles()[-1].sources > {"new"} and times.profiles()[-1].times[8].mean > new.times[8].mean


def test_names_are_bounded_and_a_slow_source_is_tried_again() -> None:
    times = LearnedTimes(FIRST, 0.02)
    for number in range(3 * MOST_SOURCES):
        times.add([f"user {number}"], 1000.0)
    assert len(frozenset().union(*[one.sources for one in times.profiles()])) == MOST_SOURCES + 1
    assert times.profiles()[-1].times[1].mean == pytest.approx(0.02)


def test_until_enough_was_seen_no_batch_is_too_long() -> None:
    times = LearnedTimes(FIRST, 10.0)
    assert not times.profiles()[-1].enough
    for _ in range(ENOUGH):
        times.add(["a"], 3.0)
    assert times.profiles()[-1].enough


def classes() -> Orloj:
    """A batch of short requests takes 1 s, one with a long request 5 s, whatever its size."""
    short, long = (LearnedTimes(Profile.linear(0.0, seconds, 4), 10.0).profiles()[0] for seconds in (1.0, 5.0))
    both = long._replace(sources=frozenset(("", "long", "short")))
    return Orloj([short._replace(sources=frozenset(("short",))), both])


@pytest.mark.parametrize(("shorts", "longs", "taken"), [(1, 3, {"short"}), (1, 1, {"short"}), (0, 2, {"long"})])
def test_the_class_with_the_most_requests_a_second_is_run(shorts: int, longs: int, taken: set[str]) -> None:
    former = classes()
    for number in range(shorts + longs):
        former.add(Request(number, "m", 0.0, 12.0, "short" if number < shorts else "long"))
    assert former.form(0.0) is not None
    assert {one.source for one in former.take()} == taken
    check_former(former)


def test_a_request_is_given_up_when_it_is_late_in_every_class() -> None:
    former = classes()
    former.add(Request(1, "m", 0.0, 3.0, "short"))
    former.add(Request(2, "m", 0.0, 3.0, "long"))
    candidate = former.form(0.0)
    assert candidate is not None and candidate.size == 1 and candidate.seconds == 1.0
    assert [told.request.id for told in former.refused()] == [2]
    assert former.changes_at() == 2.0 and former.form(math.nextafter(2.0, 3.0)) is None
    assert [told.request.id for told in former.refused()] == [1]


def test_orloj_has_its_turn_once_where_sources_are_named() -> None:
    """Full batches of both all take as long as the long ones, so their times do not vary."""
    scheduler, had = Scheduler([Model("m", FIRST, 1.0, Batching.AUTO)]), []
    for _ in range(4 * RECENT):
        both = (Request(1, "m", 0.0, 1.0, "a"), Request(2, "m", 0.0, 1.0, "b"))
        scheduler.handle(BatchTook("m", both, 0.03), 0.0)
        had.append(scheduler.batching("m"))
    assert RECENT <= had.count(Batching.ORLOJ) < 1.5 * RECENT and had[-1] is Batching.WINDOW
