"""How measurements become the times of batches."""

import math
import random

import pytest

from benchmarks.orloj_product import ProductProfile
from symphony_serve.batching.orloj import Orloj
from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.batching.orloj_profiles import BatchMap, Profiler, VaryingProfile, VaryingRequest
from symphony_serve.errors import ServeError
from symphony_serve.messages import BatchDone, Dispatch, GpuJoined, Request, RequestArrived, Suspect, Tick
from symphony_serve.model_side import EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler

MAP = BatchMap({1: (0.0, 1.0), 2: (0.0, 1.15), 4: (0.0, 1.45)})
SHORT, LONG = Histogram((0.02, 0.04), (1.0,)), Histogram((0.14, 0.16), (1.0,))


def batch(count: int, first: int = 0) -> list[VaryingRequest]:
    return [VaryingRequest(first + i, "m", 0.0, 1.0, "a") for i in range(count)]


def test_the_map_is_fitted_by_least_squares() -> None:
    rng = random.Random(1)
    longest = [rng.uniform(0.05, 0.11) for _ in range(400)]
    measured = [(2, one, 0.01 + 1.2 * one + rng.gauss(0, 0.001)) for one in longest]
    measured += [(1, one, one) for one in longest] + [(4, 0.08, 0.16), (4, 0.08, 0.18)]
    fitted = BatchMap.fitted(measured).by_size
    assert fitted[1] == (0.0, 1.0)
    assert fitted[2] == pytest.approx((0.01, 1.2), abs=0.01)
    # One length only: no line can be fitted.
    assert fitted[4] == pytest.approx((0.0, 0.17 / 0.08))
    # A line that falls is noise.
    assert BatchMap.fitted([(2, 1.0, 2.0), (2, 2.0, 1.0)]).by_size == {2: (0.0, pytest.approx(0.8))}


def test_who_takes_the_places() -> None:
    sources = {"short": SHORT, "long": LONG}
    by_chance, one_each = VaryingProfile(MAP, sources), ProductProfile(MAP, sources)
    assert by_chance.times[1].mean == pytest.approx(0.09)
    # Two at random: a quarter of the batches has two short ones.
    assert by_chance.times[2].histogram.cdf(0.05 * 1.15) == pytest.approx(0.25)
    assert one_each.times[2].histogram.cdf(0.05 * 1.15) == pytest.approx(0.0)
    assert one_each.times[2].mean == pytest.approx(0.15 * 1.15)
    skewed = VaryingProfile(MAP, sources, weights={"short": 9.0, "long": 1.0})
    assert skewed.times[1].mean == pytest.approx(0.9 * 0.03 + 0.1 * 0.15)
    assert skewed.times[2].histogram.cdf(0.05 * 1.15) == pytest.approx(0.81)


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: BatchMap({}), "no batch size"),
        (lambda: BatchMap({0: (0.0, 1.0)}), "batch size 0"),
        (lambda: BatchMap({1: (float("nan"), 1.0)}), "takes nan s"),
        (lambda: BatchMap({1: (0.0, 0.0)}), "scale above 0"),
        (lambda: BatchMap.fitted([(1, 0.0, 1.0)]), "a batch of 1 with 0.0 s took 1.0 s"),
        (lambda: VaryingProfile(MAP, {}), "without a source"),
        (lambda: VaryingProfile(BatchMap({1: (1.0, 1.0), 2: (0.0, 1.0)}), {"a": SHORT}), "larger batches take longer"),
        (lambda: VaryingProfile(BatchMap({1: (-1.0, 1.0)}), {"a": SHORT}), "edge -0.98"),
        (lambda: VaryingProfile(MAP, {"a": SHORT}, weights={"b": 1.0}), "one above 0 for each of a"),
        (lambda: Profiler(MAP).ran_alone("a", 0.0, 0.0), "took 0.0 s alone"),
    ],
)
def test_what_is_no_profile_is_refused(make, named: str) -> None:
    with pytest.raises(ServeError, match=named):
        make()


class TestProfiler:
    def test_batches_of_one_measure_for_nothing(self) -> None:
        profiler = Profiler(MAP)
        for i in range(20):
            assert profiler.finished(batch(1), 0.05 + 0.001 * i, float(i)) is None
        profile = profiler.profile()
        assert list(profile.sources) == ["a"] and list(profile.times) == [1, 2, 4]
        assert profile.times[1].mean == pytest.approx(0.0595, abs=0.001)

    def test_while_nothing_is_known_no_batch_is_too_long(self) -> None:
        former = Orloj(Profiler(MAP).profile())
        former.add(Request(1, "m", 0.0, 1.0))
        candidate = former.form(0.8)
        assert candidate is not None and candidate.longest == math.inf
        former.set_profile(VaryingProfile(MAP, {"a": SHORT}))
        candidate = former.form(0.9)
        assert candidate is not None and candidate.longest == 0.04

    def test_a_given_distribution_is_used_until_its_source_has_enough(self) -> None:
        profiler = Profiler(MAP, {"a": LONG})
        for _ in range(19):
            profiler.ran_alone("a", 0.03, 0.0)
        assert profiler.profile().sources == {"a": LONG}
        profiler.ran_alone("a", 0.03, 0.0)
        assert profiler.profile().sources == {"a": Histogram.point(0.03)}

    def test_a_new_profile_comes_once_in_ten_seconds_and_with_news_only(self) -> None:
        profiler = Profiler(MAP, {"a": SHORT})
        assert profiler.picked_up(100.0) is None
        profiler.ran_alone("a", 0.03, 100.0)
        assert profiler.picked_up(100.0) is not None
        profiler.ran_alone("a", 0.03, 101.0)
        assert profiler.picked_up(109.9) is None
        assert profiler.picked_up(110.0) is not None
        assert profiler.picked_up(200.0) is None

    def test_what_is_older_than_the_window_is_forgotten(self) -> None:
        profiler = Profiler(MAP)
        for now in range(0, 300, 10):
            profiler.ran_alone("a", 0.03, float(now))
        for now in range(300, 600, 10):
            profiler.ran_alone("a", 0.09, float(now))
        assert profiler.profile().sources["a"].edges[0] == 0.03
        profiler.ran_alone("a", 0.09, 600.0)
        assert profiler.profile().sources["a"] == Histogram.point(0.09)

    def test_one_of_a_hundred_runs_again_but_not_more_than_one_in_ten_busy_seconds(self) -> None:
        profiler = Profiler(MAP)
        again = [profiler.finished(batch(4, first=4 * i), 1.0, float(i)) for i in range(50)]
        # The 25th batch has the 100th request; then the count begins anew.
        assert [i for i, request in enumerate(again) if request is not None] == [24, 49]
        assert again[24] is not None and again[24].id == 99
        profiler = Profiler(MAP)
        again = [profiler.finished(batch(4, first=4 * i), 0.125, float(i)) for i in range(250)]
        assert [i for i, request in enumerate(again) if request is not None] == [79, 159, 239]

    def test_a_profile_that_would_be_refused_changes_nothing(self) -> None:
        crossing = BatchMap({1: (0.0, 1.0), 2: (0.05, 0.1)})
        profiler = Profiler(crossing)
        for _ in range(20):
            profiler.ran_alone("a", 0.2, 0.0)
        assert profiler.picked_up(20.0) is None


def test_a_long_batch_of_a_model_whose_times_vary_is_no_lost_gpu() -> None:
    """One request of twenty takes five times the expected 36 ms."""
    profile = VaryingProfile(BatchMap({1: (0.0, 1.0)}), {"a": SHORT, "b": LONG}, weights={"a": 0.95, "b": 0.05})
    model = Model("m", Profile.from_seconds([0.1]), 5.0, lambda *_: Orloj([profile]), EAGER)
    scheduler = Scheduler([model])
    scheduler.handle(GpuJoined(0, 1), 0.0)
    scheduler.handle(RequestArrived(Request(1, "m", 0.0, 5.0)), 0.0)
    (first,) = [one for one in scheduler.handle(Tick(), 0.0) if isinstance(one, Dispatch)]
    assert first.seconds == pytest.approx(0.036) and first.longest == 0.16
    scheduler.handle(RequestArrived(Request(2, "m", 0.01, 5.01)), 0.01)
    told = scheduler.handle(Tick(), 0.15)
    assert not [one for one in told if isinstance(one, (Suspect, Dispatch))]
    scheduler.handle(BatchDone(0, 1, first.plan), 0.16)
    (second,) = [one for one in scheduler.handle(Tick(), 0.16) if isinstance(one, Dispatch)]
    assert [request.id for request in second.requests] == [2]
    # What is far beyond all that was seen is lost all the same.
    assert [one for one in scheduler.handle(Tick(), 0.16 + 3 * 0.16 + 0.001) if isinstance(one, Suspect)]
