"""The scheduler: the paper's figures 4 and 5, who gets which GPU, GPUs that come and go, counted work, and faults."""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.rival_servers.fifo import Fifo
from symphony_serve.batching.window import Window
from symphony_serve.delays import Delays
from symphony_serve.errors import ServeError
from symphony_serve.messages import (
    BatchDone,
    BatchTook,
    Cancelled,
    Dispatch,
    GpuJoined,
    GpuLost,
    Request,
    RequestArrived,
    StoodStill,
    Suspect,
    Tick,
    WakeAt,
)
from symphony_serve.model_side import DEFERRED, EAGER, TRY_AGAIN_S, Batching, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from tests.serve.driving import TICK, Driver, staggered
from tests.serve.fault_schedules import World, orloj
from tests.serve.invariants import unanswered

#: The model of figures 4 and 5. Times are those of the figure.
FIGURE = Profile.linear(1.0, 5.0, 16)
SLO = 12.0


def figure(gathering=Fifo, policy=DEFERRED, name="m"):
    return Model(name, FIGURE, SLO, gathering, policy)


def driver(*models, **options):
    return Driver(Scheduler(models), **options)


def ids(first, last):
    return list(range(first, last + 1))


@pytest.mark.parametrize("gathering", [Fifo, Window])
def test_figure_4_batches_stagger_by_themselves(gathering):
    run = driver(figure(gathering))
    run.joins(0.0, 0.0, 0.0)
    run.requests(staggered("m", 24, 0.75, SLO))
    run.run()
    assert run.batches == [
        (2.25, 1, ids(1, 4)),
        (5.25, 2, ids(5, 8)),
        (8.25, 3, ids(9, 12)),
        (11.25, 1, ids(13, 16)),
        (14.25, 2, ids(17, 20)),
        (17.25, 3, ids(21, 24)),
    ]
    assert not run.refused


def test_figure_5b_deferred_recovers_from_three_missing_requests():
    run = driver(figure())
    run.joins(0.0, 0.0, 0.0)
    run.requests(one for one in staggered("m", 31, 0.75, SLO) if one.id not in (13, 14, 15))
    run.run()
    assert run.batches[3:] == [
        (13.50, 1, ids(16, 19)),
        (16.50, 2, ids(20, 23)),
        (19.50, 3, ids(24, 27)),
        (22.50, 1, ids(28, 31)),
    ]
    assert not run.refused


class TestMatching:
    @pytest.mark.parametrize(("policy", "start"), [(DEFERRED, 5.0), (EAGER, 0.0)])
    def test_the_start_by_policy(self, policy, start):
        run = driver(figure(policy=policy))
        run.joins(0.0)
        run.requests([Request(1, "m", 0.0, 12.0)])
        assert run.run().batches == [(start, 1, [1])]

    def test_a_gpu_goes_to_the_model_that_must_start_soonest(self):
        run = driver(figure(name="a", policy=EAGER), figure(name="b", policy=EAGER))
        run.joins(3.0)
        run.requests([Request(1, "a", 0.0, 13.0), Request(2, "b", 1.0, 12.0)])
        run.run()
        assert run.batches == [(3.0, 1, [2])]
        assert run.refused == {1: "LATE"}

    def test_a_gpu_that_becomes_free_at_the_last_moment_is_in_time(self):
        run = driver(figure())
        run.joins(6.0)
        run.requests([Request(1, "m", 0.0, 12.0)])
        assert run.run().batches == [(6.0, 1, [1])]

    @pytest.mark.parametrize("gathering", [Fifo, Window, orloj])
    @pytest.mark.parametrize("policy", [DEFERRED, EAGER])
    def test_what_gets_no_gpu_is_refused_when_a_batch_of_one_would_be_late(self, gathering, policy):
        """The GPU is busy for 100 s. From 6 on no batch would end by 12, from 7 on none by 13."""
        run = driver(figure(gathering, policy))
        run.joins(100.0)
        run.requests([Request(1, "m", 0.0, 12.0), Request(2, "m", 1.0, 13.0)])
        run.run()
        assert run.refused_at == pytest.approx({1: 6.0, 2: 7.0})
        assert not run.batches


class TestGpus:
    def test_a_silent_gpu_becomes_suspect_and_its_requests_move(self):
        run = driver(Model("m", FIGURE, 40.0, Fifo, EAGER), answers=False)
        run.joins(0.0)
        run.requests([Request(1, "m", 0.0, 40.0)])
        run.at(18.0, GpuJoined(2, 1), order=TICK + 1)
        run.run(until=20.0)
        assert run.others == [Suspect(1, 1)]
        assert run.batches == [(0.0, 1, [1]), (18.0, 2, [1])]
        run.at(20.0, BatchDone(1, 1, 0))
        run.at(21.0, BatchDone(2, 1, 0))
        run.run(until=22.0)
        assert unanswered(run.scheduler) == set()

    def test_a_short_batch_has_the_least_patience_and_as_much_more_as_nobody_could_hear(self):
        run = Driver(Scheduler([Model("m", FIGURE, 100.0, Fifo, EAGER)], least_patience=30.0), answers=False)
        run.joins(0.0)
        run.requests([Request(1, "m", 0.0, 100.0)])
        run.at(30.0, StoodStill(12.0))
        assert run.run(until=41.0).others == []
        assert run.run(until=42.0).others == [Suspect(1, 1)]

    def test_the_requests_of_a_lost_gpu_wait_again_or_are_refused(self):
        """2 has no time for another GPU, and nobody wants 3 any more. 1 may be what ends GPUs: it gets no third one."""
        run = driver(figure(policy=EAGER), answers=False)
        run.joins(0.0)
        run.requests([Request(1, "m", 0.0, 12.0), Request(2, "m", 0.0, 9.0), Request(3, "m", 0.0, 12.0)])
        run.at(3.0, Cancelled("m", 3))
        run.at(4.0, GpuLost(1))
        for gpu in (2, 3):
            run.at(3.0 + gpu, GpuJoined(gpu, 1))
        run.at(5.5, GpuLost(2))
        run.run(until=7.0)
        assert run.batches == [(0.0, 1, [2, 1, 3]), (5.0, 2, [1])]
        assert run.refused == {1: "LOST_TWICE", 2: "GPU_LOST", 3: "CANCELLED"}

    def test_what_a_gpu_answers_under_an_old_token_is_no_answer(self):
        run = driver(figure(policy=EAGER), answers=False)
        run.joins(0.0)
        run.requests([Request(1, "m", 0.0, 12.0)])
        for at, event in enumerate((GpuLost(1), GpuJoined(1, 2), BatchDone(1, 1, 0)), 1):
            run.at(float(at), event)
        run.run(until=4.0)
        assert run.batches == [(0.0, 1, [1]), (2.0, 1, [1])] and unanswered(run.scheduler) == {1}


class TestRequests:
    def test_reasons(self):
        run = driver(figure())
        run.joins(0.0)
        run.requests([Request(1, "m", 0.0, 5.0), Request(2, "x", 0.0, 12.0), Request(3, "m", 0.0, 12.0)])
        run.at(1.0, Cancelled("m", 3))
        run.at(1.0, Cancelled("m", 3))
        run.run()
        assert run.refused == {1: "LATE_ON_ARRIVAL", 2: "UNKNOWN_MODEL", 3: "CANCELLED"}
        assert not run.batches

    def test_no_model_and_two_of_one_name_are_refused(self):
        for models, said in (([], "not at all"), ([figure(), figure()], "m, m")):
            with pytest.raises(ServeError, match=said):
                Scheduler(models)


def test_a_tick_that_comes_too_early_is_asked_for_again():
    scheduler = Scheduler([figure()])
    scheduler.handle(GpuJoined(1, 1), 0.0)
    assert scheduler.handle(RequestArrived(Request(1, "m", 0.0, 12.0)), 0.0) == [WakeAt(5.0)]
    assert scheduler.handle(Tick(), 4.999) == [WakeAt(5.0)]


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 400), marks=pytest.mark.slow)], ids=str)
def test_seeded_faults(seeds):
    """`tests.serve.fault_schedules` runs more."""
    outcomes = set()
    for seed in seeds:
        outcomes.update(World(seed).play().values())
    assert outcomes >= {"answered", "LATE", "CANCELLED", "UNKNOWN_MODEL", "GPU_LOST", "LOST_TWICE"}


# A model that was slow once is tried again, also if each request has less time than a batch took then.

#: A batch of 1 takes 10 ms. Requests come each 0.1 s, and have half of the SLO of a second.
FIRST, GAP, LEFT = Profile.linear(0.001, 0.009, 64), 0.1, 0.5


class Truly(Driver):
    """Batches truly take what the first profile says, and ``slow(dispatch)`` seconds more."""

    def __init__(self, model, slow):
        super().__init__(Scheduler([model], least_patience=1.0), answers=False)
        self._slow, self._ends = slow, 0.0
        self.joins(0.0)

    def _carry_out(self, instruction):
        super()._carry_out(instruction)
        if isinstance(instruction, Dispatch):
            seconds = FIRST.seconds(len(instruction.requests)) + self._slow(instruction)
            end = self._ends = max(self._ends, instruction.start) + seconds
            self.at(end, BatchDone(instruction.gpu, instruction.token, instruction.plan))
            self.at(end, BatchTook(instruction.model, instruction.requests, seconds))


def asked(model, slow, seconds=20.0):
    run = Truly(model, slow)
    arrivals = [GAP * number for number in range(int(seconds / GAP))]
    run.requests(Request(number, "m", arrival, arrival + LEFT) for number, arrival in enumerate(arrivals))
    return run.run()


@pytest.mark.parametrize("batching", Batching)
@pytest.mark.parametrize("delays", [Delays(), Delays(0.002, 0.001)])
@pytest.mark.parametrize("slow_at", [0.0, 15.0])
def test_after_a_slow_batch_requests_are_refused_for_a_second_or_two(batching, delays, slow_at):
    ended = []
    run = asked(
        Model("m", FIRST, 1.0, batching, delays=delays),
        lambda sent: 0.7 if sent.start >= slow_at and not ended and not ended.append(sent) else 0.0,
        40.0,
    )
    assert ended and 399 in run.batches[-1][2], "the newest request is served"
    assert len(run.refused) <= 3 * TRY_AGAIN_S / GAP
    assert run.scheduler.profile("m").seconds(1) < LEFT / 5


@pytest.mark.parametrize("batching", [Batching.WINDOW, Batching.ORLOJ])
def test_a_model_that_stays_slow_is_tried_once_a_second_and_its_device_is_not_lost(batching):
    """Its batches of more than a second take more than `AsyncServer` waits for one of 10 ms."""
    run = asked(Model("m", FIRST, 3.0, batching), lambda sent: 1.5 if sent.start > 1.0 else 0.9)
    assert not [one for one in run.others if isinstance(one, Suspect)]
    starts = [start for start, _, _ in run.batches]
    assert len(starts) >= 20.0 / 3 and all(len(ids) == 1 for _, _, ids in run.batches[1:])
    assert all(after - before > TRY_AGAIN_S for before, after in itertools.pairwise(starts))


def test_large_batches_are_tried_though_small_ones_take_far_longer_than_was_measured():
    """One input in ten takes 80 ms, the others 5 ms, and only batches of more than 8 were measured with a long one."""
    draw = random.Random(0)
    long = {number for number in range(4000) if draw.random() < 0.1}
    first = Profile.from_seconds([0.006] * 8 + [0.088] * 56)

    def more(sent):
        takes = 0.08 if any(one.id in long for one in sent.requests) else 0.005
        return takes - FIRST.seconds(len(sent.requests))

    run = Truly(Model("m", first, 0.3, Batching.WINDOW, EAGER), more)
    run.requests(Request(number, "m", number / 200, number / 200 + 0.3) for number in range(4000))
    assert len(run.run().refused) <= 40


def test_a_request_that_is_too_late_by_the_first_profile_too_is_no_try():
    run = Truly(Model("m", FIRST, 1.0, Batching.WINDOW), lambda sent: 0.0)
    first = Request(1, "m", 0.0, 1.0)
    run.at(0.0, RequestArrived(first))
    run.at(2.0, BatchTook("m", (first,), 0.7))
    run.at(9.0, RequestArrived(Request(2, "m", 9.0, 9.005)))
    run.run()
    assert run.refused == {2: "LATE_ON_ARRIVAL"} and run.scheduler.profile("m").seconds(1) == pytest.approx(0.7)
