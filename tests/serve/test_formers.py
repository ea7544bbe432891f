"""The formers fifo, window and Orloj: what holds of all of them, and what tells them apart."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.orloj_profiles import BatchMap, VaryingProfile, point
from benchmarks.orloj_worker import Earliest
from benchmarks.rival_servers.fifo import Fifo
from symphony_serve.batching import Candidate
from symphony_serve.batching.orloj import Orloj
from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.batching.window import Window
from symphony_serve.delays import NO_DELAYS, Delays
from symphony_serve.errors import ServeError
from symphony_serve.messages import BatchDone, Dispatch, GpuJoined, Reason, Request, RequestArrived, Suspect, Tick
from symphony_serve.model_side import DEFERRED, EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from tests.serve.invariants import check_former

#: l(b) = b + 5 for batches of up to 6 (figure 4's model).
SECONDS = [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
SEEDS = range(20)
#: The model of Table 2 with the strong batching effect: seconds for each request and each batch, and its SLO.
TABLE_2 = Profile.linear(1.053e-3, 5.072e-3, 64)
TABLE_2_SLO = 25e-3


def asked(number, deadline, arrival=0.0):
    """A request of the model ``m``."""
    return Request(number, "m", arrival, deadline)


def constant(seconds):
    """Batches of these sizes always take these seconds."""
    first = min(seconds.values())
    return VaryingProfile(BatchMap({size: (value - first, 1.0) for size, value in seconds.items()}), {"": point(first)})


@pytest.fixture(params=[Fifo, Window, Orloj])
def make(request):
    """Makes a former of a model whose batches of 1, 2, 3 and so on always take these seconds.

    The requests of the tests have deadlines about 12 s after they come.
    """
    if request.param is Orloj:
        return lambda seconds: Orloj([constant(dict(enumerate(seconds, 1)))])
    return lambda seconds: request.param(Profile.from_seconds(seconds), 12.0, NO_DELAYS)


def entries(one, seen=None):
    """How many entries the lists, dicts and sets have that a former is made of."""
    seen = set() if seen is None else seen
    if id(one) in seen or isinstance(one, Request):
        return 0
    seen.add(id(one))
    if isinstance(one, dict):
        return len(one) + sum(entries(value, seen) for value in one.values())
    if isinstance(one, list | tuple | set):
        return len(one) + sum(entries(value, seen) for value in one)
    return sum(entries(value, seen) for value in vars(one).values()) if hasattr(one, "__dict__") else 0


def test_a_batch_that_starts_at_the_last_moment_is_in_time(make):
    """Also where the sums of times are rounded: the moment is computed as the caller computes it."""
    for seed in SEEDS:
        rng = random.Random(seed)
        former = make([rng.uniform(5.0, 6.0)])
        former.add(asked(1, rng.uniform(11.0, 12.0)))
        candidate = former.form(0.0)
        latest = candidate.deadline - candidate.seconds
        assert former.form(latest) == candidate
        assert former.form(math.nextafter(latest, math.inf)) is None
        assert len(former) == 0


@pytest.mark.parametrize("deadline", [math.nan, math.inf, -math.inf])
def test_a_deadline_that_is_no_time_is_refused(make, deadline):
    former = make(SECONDS)
    former.add(asked(1, 30.0))
    with pytest.raises(ServeError, match=f"request 2 has the deadline {deadline} s"):
        former.add(asked(2, deadline))
    assert [waiting.id for waiting in former.waiting()] == [1]
    check_former(former)


def test_what_was_refused_is_not_kept_though_no_batch_is_taken(make):
    """A thousandth of the requests wait at a time."""
    former, now = make(SECONDS), 0.0
    for number in range(10_000):
        now += 1.0
        former.add(asked(number, now + 12.0, now))
        former.form(now)
        former.refused()
    assert 0 < len(former) < 20
    check_former(former)
    assert entries(former) < 1000
    former.form(now + 100.0)
    assert len(former) == 0 and len(former.refused()) > 0
    check_former(former)
    assert entries(former) < 1000


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_neither_vanish_nor_appear_twice_and_wait_in_the_order_of_deadlines_and_ids(make, seed):
    """Requests come, are removed and taken at random moments; every batch is in time, and as large as measured.

    A batch has the earliest of the deadlines that are feasible, but for Orloj's. What is refused is late, was at its
    arrival, which Orloj tells apart, or makes way while it would be in time alone.
    """
    former, rng = make(SECONDS), random.Random(seed)
    now, left, gone, largest = 0.0, {}, set(), 0
    former.set_rate(rng.choice([0.1, 1.0, 10.0]))
    for number in range(300):
        now += rng.choice([0.0, 0.1, 1.0, 3.0])
        step = rng.random()
        if step < 0.7:
            deadline = now + rng.choice([-5.0, 3.0, 9.0, 12.0, rng.uniform(6.0, 20.0)])
            former.add(asked(number, deadline, now))
            left[number] = deadline
        elif step < 0.75 and left:
            chosen = rng.choice(sorted(left))
            assert [one and one.id for one in (former.remove(chosen), former.remove(chosen))] == [chosen, None]
            del left[chosen]
            gone.add(chosen)
        candidate = former.form(now)
        check_former(former)
        refused = list(former.refused())
        assert list(former.refused()) == []
        for told in refused:
            latest = told.request.deadline - SECONDS[0]
            never = isinstance(former, Orloj) and told.request.arrival > latest
            late = Reason.LATE_ON_ARRIVAL if never else Reason.LATE
            assert told.reason is (Reason.MAKES_WAY if now <= latest else late)
        leaving = [told.request.id for told in refused]
        if candidate is not None:
            assert now <= candidate.deadline - candidate.seconds
            assert candidate.next_seconds >= candidate.seconds == SECONDS[candidate.size - 1]
            assert former.form(now) == candidate
            assert now <= former.changes_at()
            largest = max(largest, candidate.size)
            if rng.random() < 0.3:
                taken = former.take()
                assert len(taken) == candidate.size
                earliest = min(one.deadline for one in taken)
                assert earliest == candidate.deadline or (isinstance(former, Orloj) and earliest > candidate.deadline)
                leaving += [one.id for one in taken]
        assert len(set(leaving)) == len(leaving) and left.keys() >= set(leaving)
        for one in leaving:
            del left[one]
        gone.update(leaving)
        assert [waiting.id for waiting in former.waiting()] == sorted(left, key=lambda one: (left[one], one))
        assert len(former) == len(left)
    assert gone and 1 < largest <= len(SECONDS)


class TestGathering:
    def test_window_equals_its_definition(self):
        """The pointer that never goes back gives what a search from the head gives, whatever comes in between."""
        for seed in range(30):
            rng = random.Random(seed)
            target = rng.randrange(1, 7)
            fast, now = Window(Profile.linear(1.0, 5.0, 8), 12.0, NO_DELAYS), 0.0
            fast.target = target
            plain: list[tuple[float, int]] = []
            for number in range(200):
                now += rng.choice([0.0, 0.25, 1.0, 4.0])
                for extra in range(rng.randrange(4)):
                    entry = (now + rng.uniform(5.0, 20.0), 10 * number + extra)
                    fast.add(asked(entry[1], entry[0]))
                    plain.append(entry)
                plain.sort()
                size = _window_by_definition(plain, now, target, lambda b: b + 5.0 if b <= 8 else math.inf)
                candidate = fast.form(now)
                assert (candidate.size if candidate else 0) == size
                assert [waiting.id for waiting in fast.waiting()] == [entry[1] for entry in plain]
                if rng.random() < 0.4:
                    fast.take()
                    del plain[:size]
                elif rng.random() < 0.1 and plain:
                    fast.remove(plain.pop(rng.randrange(len(plain)))[1])


def _window_by_definition(queue, now, target, latency):
    """The size of the batch; removes the heads that are given up from ``queue``, a sorted list of (deadline, id)."""
    count = len(queue)
    first = next((i for i in range(count) if now + latency(count - i) <= queue[i][0]), count)
    size = min(target, count - first)
    if size == 0:
        queue.clear()
        return 0
    while queue[0][0] < now + latency(size):
        del queue[0]
    while size < len(queue) and now + latency(size + 1) <= queue[0][0]:
        size += 1
    return size


def test_the_target_follows_the_rate():
    """Golden example 4, table 2 at its goodput: l(16)*(1 + 1/7.21) = 24.96 <= 25 ms; b = 17 takes 26.2 ms."""
    former = Window(TABLE_2, TABLE_2_SLO, NO_DELAYS)
    assert former.target == 7
    former.set_rate(5264.0)
    assert former.target == 16


class TestDelays:
    """l(b) = b + 5, with a margin of 1 s."""

    @pytest.mark.parametrize("former", [Fifo, Window])
    def test_a_batch_has_time_for_its_answers(self, former):
        made = former(Profile.linear(1.0, 5.0, 8), 20.0, Delays(response=0.75, jitter=0.25))
        for number in range(3):
            made.add(asked(number, 13.0))
        candidate = made.form(4.0)
        assert candidate == Candidate(3, 12.0, 8.0, 9.0)
        assert made.changes_at() == 4.0
        candidate = made.form(4.1)
        assert candidate.size == 2

    def test_a_wrong_delay_is_refused(self):
        for wrong in (-1.0, math.inf):
            with pytest.raises(ServeError, match=f"delay jitter is {wrong}"):
                Delays(jitter=wrong)


def test_a_full_batch_starts_at_once():
    """Golden example 8."""
    former = Fifo(Profile.linear(1.0, 5.0, 2), 12.0, NO_DELAYS)
    for number in range(3):
        former.add(asked(number, 20.0))
    assert DEFERRED.earliest(former.form(0.0)) == -math.inf


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
        former.add(asked(number, deadline))
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
    former.add(asked(1, 0.08))
    former.add(asked(2, 0.2))
    candidate = former.form(0.0)
    assert candidate is not None and candidate.size == 1 and candidate.deadline == 0.08
    assert [taken.id for taken in former.take()] == [2]


def test_new_times_count_from_the_next_form_on() -> None:
    former = Orloj([constant({1: 6.0, 2: 8.0})])
    for number in range(2):
        former.add(asked(number, 12.0))
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
