"""The former Orloj: the contract, the golden run of algorithm 4.1, and what is its own."""

import pytest

from benchmarks.orloj_profiles import BatchMap, VaryingProfile, point
from benchmarks.orloj_worker import Earliest
from symphony_serve.batching.orloj import Orloj
from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.messages import BatchDone, Dispatch, GpuJoined, Reason, Request, RequestArrived, Suspect, Tick
from symphony_serve.model_side import EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from tests.serve.batch_formers import BatchFormerContract, request


def constant(seconds: dict[int, float]) -> VaryingProfile:
    """Batches of these sizes always take these seconds."""
    first = min(seconds.values())
    return VaryingProfile(BatchMap({size: (value - first, 1.0) for size, value in seconds.items()}), {"": point(first)})


class TestLargest(BatchFormerContract):
    by_deadline = False

    @pytest.fixture
    def make(self):
        return lambda seconds: Orloj([constant(dict(enumerate(seconds, 1)))])


@pytest.mark.parametrize(
    "kind, wanted",
    [
        (Orloj, [({2, 3}, 0, 15), ({4, 5}, 15, 30)]),
        (Earliest, [({1}, 0, 10), ({3, 4}, 10, 25)]),
    ],
)
def test_golden_5(kind: type[Orloj], wanted: list) -> None:
    """L_k is always 5 + 5k: 4 of 5 requests are in time, or 3."""
    former = kind([constant({1: 10.0, 2: 15.0, 4: 25.0})])
    for number, deadline in enumerate((12.0, 18.0, 30.0, 30.0, 30.0), 1):
        former.add(request(number, deadline))
    now, batches, refused = 0.0, [], []
    while (candidate := former.form(now)) is not None:
        taken = {one.id for one in former.take()}
        batches.append((taken, now, now + candidate.seconds))
        now += candidate.seconds
    refused += [told.request.id for told in former.refused()]
    assert batches == wanted
    assert set(refused) == {1, 2, 3, 4, 5} - set().union(*(taken for taken, _, _ in wanted))


def varying(sizes: tuple[int, ...]) -> VaryingProfile:
    """Two sources of 40 to 60 and 90 to 110 ms; each more request takes 15 % of the longest."""
    sources = {"short": Histogram((0.04, 0.06), (1.0,)), "long": Histogram((0.09, 0.11), (1.0,))}
    return VaryingProfile(BatchMap({size: (0.0, 1 + 0.15 * (size - 1)) for size in sizes}), sources)


def test_a_request_that_hardly_ends_in_time_makes_way() -> None:
    """A batch of one takes 40 to 60 or 90 to 110 ms: 75 expected, which ends in time for only half of the first."""
    former = Orloj([varying((1,))])
    former.add(request(1, 0.08))
    former.add(request(2, 0.2))
    candidate = former.form(0.0)
    assert candidate is not None and candidate.size == 1 and candidate.deadline == 0.08
    assert [taken.id for taken in former.take()] == [2]


def test_late_on_arrival_is_told_apart() -> None:
    former = Orloj([constant({1: 6.0})])
    former.add(request(1, 5.0))
    former.add(request(2, 7.0))
    former.form(2.0)
    assert [(told.request.id, told.reason) for told in former.refused()] == [
        (1, Reason.LATE_ON_ARRIVAL),
        (2, Reason.LATE),
    ]


def test_new_times_count_from_the_next_form_on() -> None:
    former = Orloj([constant({1: 6.0, 2: 8.0})])
    for number in range(2):
        former.add(request(number, 12.0))
    candidate = former.form(0.0)
    assert candidate is not None and candidate.size == 2
    former.set_profile([constant({1: 10.0, 2: 20.0})])
    candidate = former.form(0.0)
    assert candidate is not None and (candidate.size, candidate.seconds) == (1, 10.0)
    former.set_profile([constant({1: 13.0})])
    assert former.form(0.0) is None and len(former.refused()) == 2


def test_a_long_batch_of_a_model_whose_times_vary_is_no_lost_gpu() -> None:
    """One request of twenty takes five times the expected 36 ms."""
    sources = {"short": Histogram((0.02, 0.04), (1.0,)), "long": Histogram((0.14, 0.16), (1.0,))}
    profile = VaryingProfile(BatchMap({1: (0.0, 1.0)}), sources, weights={"short": 0.95, "long": 0.05})
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
