"""A served model that takes turns with a trial: the rule on the twin, and what the scheduler is told of waits."""

from __future__ import annotations

import math

import pytest

from benchmarks.serve import staggered
from benchmarks.serve_arrivals import poisson
from benchmarks.serve_varying import VaryingSimulation
from symphony_serve.messages import SAME_MOMENT_S, Dispatch
from symphony_serve.model_side import DEFERRED, EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.seen_times import EVERY, RECENT, SeenTimes
from symphony_serve.shell.async_server import AsyncServer
from symphony_serve.shell.device import LocalDevice, Waited

#: l(b) = b + 5 ms; the SLO, and the iterations of the trial.
ALONE = Profile.linear(0.001, 0.005, 64)
SLO_S, ITERATION_S = 0.2, 0.05


class Beside:
    """A device that a trial uses as well. Its `takes` is that of a `VaryingSimulation`.

    The trial runs one iteration after the other. A batch that was sent starts when the iteration that runs has ended,
    and before the next one. So it waits for one iteration at most.

    profile: of the model when nobody else uses the device. iteration: the seconds of each iteration of the trial.
    """

    def __init__(self, profile: Profile, iteration: float):
        self._profile, self._iteration = profile, iteration
        #: When the last batch has ended: since then the trial runs, one iteration after the other.
        self.now = 0.0
        #: Iterations that have ended, and seconds of batches.
        self.iterations, self.served = 0, 0.0

    def takes(self, batch: Dispatch) -> float:
        """Seconds from the batch's start, as the scheduler sees it, until its end."""
        elapsed = batch.start - self.now
        ended = max(0, math.ceil((elapsed - SAME_MOMENT_S) / self._iteration))
        wait = max(0.0, ended * self._iteration - elapsed)
        seconds = self._profile.seconds(len(batch.requests))
        self.iterations += ended
        self.served += seconds
        self.now = batch.start + wait + seconds
        return wait + seconds


def served(policy, rate, beside, told=ITERATION_S):
    """A model on one device. told: the seconds of waiting that the scheduler allows for."""
    profile = Profile.from_seconds([value + told for value in ALONE.table[1:-1]])
    model = Model("m", profile, SLO_S, policy=policy)
    requests = poisson({"m": rate}, {"m": SLO_S}, seed=7)
    return VaryingSimulation(Scheduler([model]), 1, requests, 1.0, 8.0, beside.takes).run()


@pytest.fixture(scope="module")
def peak():
    """What the model bears at best if it has the device alone (equations 1 and 2)."""
    return staggered(ALONE, SLO_S, 1).rate


@pytest.mark.parametrize("policy", [EAGER, DEFERRED], ids=lambda policy: policy.name)
def test_at_30_percent_load_requests_are_in_time_and_the_trial_loses_what_is_served(peak, policy):
    beside = Beside(ALONE, ITERATION_S)
    outcome = served(policy, 0.3 * peak, beside)
    assert outcome.bad_rate <= 0.01
    assert 1 - beside.iterations * ITERATION_S / beside.now <= beside.served / beside.now + 0.05


def test_a_batch_must_be_sent_an_iteration_before_it_must_start(peak):
    assert served(DEFERRED, 0.3 * peak, Beside(ALONE, ITERATION_S), told=0.0).bad_rate > 0.1


def test_the_longest_of_the_latest_waits_is_added_to_each_size():
    seen = SeenTimes(Profile.from_seconds([0.1, 0.2]), 10.0)
    for number in range(EVERY):
        seen.add(1, 0.1, waited=3.0 if number == 2 else 0.5)
    assert seen.profile.table[1:3] == pytest.approx((3.1, 3.2))
    for _ in range(RECENT):
        seen.add(1, 0.1)
    assert seen.profile.table[1:3] == pytest.approx((0.1, 0.2))


async def test_the_server_does_not_take_a_wait_for_work():
    batches, device = [], LocalDevice({"m": lambda values: Waited(values, 40.0)})
    model = Model("m", Profile.from_seconds([0.5]), 100.0, policy=EAGER)
    async with AsyncServer([model], [device], batches.append) as server:
        assert await server.ask("m", 3) == 3
    device.close()
    (batch,) = batches
    # It has waited before it worked: its seconds are what is left of the time since it was sent.
    assert batch.seconds < 0 < 40.0 <= batch.waited
