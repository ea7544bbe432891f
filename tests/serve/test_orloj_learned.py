"""What is learned of the times of sources, and when a model's requests change over to the other former."""

import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from symphony_serve.batching.orloj import Orloj
from symphony_serve.batching.orloj_learned import ENOUGH, MOST_SOURCES, LearnedTimes
from symphony_serve.delays import Delays
from symphony_serve.messages import (
    BatchDone,
    BatchTook,
    Cancelled,
    Dispatch,
    GpuJoined,
    GpuLost,
    Refuse,
    Request,
    RequestArrived,
    Tick,
    WakeAt,
)
from symphony_serve.model_side import DEFERRED, EAGER, Batching, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.seen_times import RECENT
from tests.serve.batch_formers import request
from tests.serve.invariants import check_former, check_scheduler, unanswered

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


class ChangesOver(RuleBasedStateMachine):
    """A service with two models on two GPUs, the times of which vary for a while and then do not."""

    def __init__(self) -> None:
        super().__init__()
        self.models = {
            "auto": Model("auto", FIRST, 0.2, Batching.AUTO, EAGER, Delays(response=0.001)),
            "late": Model("late", FIRST, 0.2, Batching.AUTO, DEFERRED, Delays(response=0.001)),
        }
        self.scheduler = Scheduler(self.models.values(), least_patience=1e9)
        self.now, self.wake, self.token, self.number = 0.0, math.inf, 1, 0
        self.asked: dict[int, Request] = {}
        self.running: dict[int, Dispatch] = {}
        self.tell(GpuJoined(0, 1))
        self.tell(GpuJoined(1, 1))

    def tell(self, event) -> None:
        for told in self.scheduler.handle(event, self.now):
            if isinstance(told, WakeAt):
                self.wake = told.at
            elif isinstance(told, Dispatch):
                assert told.gpu not in self.running
                self.running[told.gpu] = told
            elif isinstance(told, Refuse):
                assert self.now <= told.request.deadline or isinstance(event, GpuLost)
                del self.asked[told.request.id]  # KeyError: it was answered or refused before.
        check_scheduler(self.scheduler)

    def until(self, moment: float) -> None:
        while self.wake <= moment:
            self.now, self.wake = max(self.now, self.wake), math.inf
            self.tell(Tick())
        self.now = moment

    @rule(model=st.sampled_from(["auto", "late"]), count=st.integers(1, 12), source=st.sampled_from(["", "a", "b"]))
    def come(self, model: str, count: int, source: str) -> None:
        for _ in range(count):
            self.number += 1
            asked = Request(self.number, model, self.now, self.now + 0.2, source)
            self.asked[asked.id] = asked
            self.tell(RequestArrived(asked))

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.05]))
    def pass_time(self, seconds: float) -> None:
        self.until(self.now + seconds)

    @rule(gpu=st.sampled_from([0, 1]), stretch=st.sampled_from([0.2, 1.0, 8.0]))
    def end(self, gpu: int, stretch: float) -> None:
        batch = self.running.pop(gpu, None)
        if batch is not None:
            for one in batch.requests:
                del self.asked[one.id]
            self.tell(BatchDone(gpu, batch.token, batch.plan))
            took = stretch * FIRST.seconds(len(batch.requests))
            self.tell(BatchTook(batch.model, batch.requests, took, 0.0))

    @rule(model=st.sampled_from(["auto", "late"]), vary=st.booleans())
    def many_batches(self, model: str, vary: bool) -> None:
        """Seen without their requests, so that the former changes over within an example."""
        for number in range(3 * RECENT):
            some = tuple(request(-1 - place, 1.0) for place in range(1 + number % 2))
            took = FIRST.seconds(len(some)) * (1 + number % 7 if vary else 1)
            self.tell(BatchTook(model, some, took))
        assert not vary or self.scheduler.batching(model) is Batching.ORLOJ

    @rule(place=st.integers(0, 200))
    def cancel(self, place: int) -> None:
        if self.asked:
            one = list(self.asked.values())[place % len(self.asked)]
            self.tell(Cancelled(one.model, one.id))

    @rule(gpu=st.sampled_from([0, 1]))
    def lose(self, gpu: int) -> None:
        self.running.pop(gpu, None)
        self.tell(GpuLost(gpu))
        self.token += 1
        self.tell(GpuJoined(gpu, self.token))

    @invariant()
    def none_is_lost(self) -> None:
        assert unanswered(self.scheduler) == self.asked.keys()

    def teardown(self) -> None:
        """All that is asked is answered or refused within an SLO, when GPUs end what they run."""
        for _ in range(400):
            for gpu in list(self.running):
                self.end(gpu, 1.0)
            self.until(self.now + 0.001)
        assert not self.asked


TestChangesOver = ChangesOver.TestCase
TestChangesOver.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)


def test_orloj_has_its_turn_once_where_sources_are_named() -> None:
    """Full batches of both all take as long as the long ones, so their times do not vary."""
    scheduler, had = Scheduler([Model("m", FIRST, 1.0, Batching.AUTO)]), []
    for _ in range(4 * RECENT):
        both = (Request(1, "m", 0.0, 1.0, "a"), Request(2, "m", 0.0, 1.0, "b"))
        scheduler.handle(BatchTook("m", both, 0.03), 0.0)
        had.append(scheduler.batching("m"))
    assert RECENT <= had.count(Batching.ORLOJ) < 1.5 * RECENT and had[-1] is Batching.WINDOW
