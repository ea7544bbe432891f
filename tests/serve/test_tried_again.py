"""A model that was slow once is tried again, also if each request has less time than a batch took then."""

from __future__ import annotations

import itertools
import random

import pytest

from symphony_serve.delays import Delays
from symphony_serve.messages import BatchDone, BatchTook, Dispatch, Request, RequestArrived, Suspect
from symphony_serve.model_side import EAGER, TRY_AGAIN_S, Batching, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from tests.serve.driving import Driver

#: A batch of 1 takes 10 ms. Requests come each 0.1 s, and have half of the SLO.
FIRST, SLO, GAP, LEFT = Profile.linear(0.001, 0.009, 64), 1.0, 0.1, 0.5


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
        Model("m", FIRST, SLO, batching, delays=delays),
        lambda sent: 0.7 if sent.start >= slow_at and not ended and not ended.append(sent) else 0.0,
        40.0,
    )
    assert ended and 399 in run.batches[-1][2], "the newest request is served"
    assert len(run.refused) <= 3 * TRY_AGAIN_S / GAP
    assert run.scheduler.profile("m").seconds(1) < LEFT / 5


@pytest.mark.parametrize("batching", [Batching.WINDOW, Batching.ORLOJ])
def test_a_model_that_stays_slow_is_tried_once_a_second_and_its_device_is_not_lost(batching):
    """Its batches of more than a second take more than `AsyncServer` waits for one of 10 ms."""
    run = asked(Model("m", FIRST, 3 * SLO, batching), lambda sent: 1.5 if sent.start > 1.0 else 0.9)
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
    run = Truly(Model("m", FIRST, SLO, Batching.WINDOW), lambda sent: 0.0)
    first = Request(1, "m", 0.0, SLO)
    run.at(0.0, RequestArrived(first))
    run.at(2.0, BatchTook("m", (first,), 0.7))
    run.at(9.0, RequestArrived(Request(2, "m", 9.0, 9.005)))
    run.run()
    assert run.refused == {2: "LATE_ON_ARRIVAL"} and run.scheduler.profile("m").seconds(1) == pytest.approx(0.7)
