"""What is learned of the times of sources, and when a model's requests change over to the other former."""

import math
import random

import pytest

from symphony_serve.batching.orloj import Orloj
from symphony_serve.batching.orloj_learned import ENOUGH, MOST_SOURCES, LearnedTimes
from symphony_serve.messages import BatchTook, Request
from symphony_serve.model_side import Batching, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.seen_times import RECENT
from tests.serve.invariants import check_former

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
