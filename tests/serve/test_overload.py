"""Overload grows no queue: at three times the load that the GPUs bear, what is unanswered came within the last SLO.

So the bound is the number of requests that came in the last SLO, counted: rate times SLO and one for regular arrivals,
more by the burstiness of the arrivals where these come in bursts. It includes what runs. Of it, what waits came within
the last SLO less the time of a batch of 1, since what is older can only be late.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left

import pytest

from benchmarks.rival_servers.fifo import Fifo
from benchmarks.serve_arrivals import arrivals
from symphony_serve.batching.window import Window
from symphony_serve.delays import NO_DELAYS, Delays
from symphony_serve.messages import SAME_MOMENT_S
from symphony_serve.model_side import DEFERRED, EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from tests.serve.driving import Driver, staggered
from tests.serve.fault_schedules import orloj
from tests.serve.invariants import unanswered

#: The model of figure 4, whose batches have at most 8 requests, so that 3 GPUs bear 3 * 8 / 13 of them per second.
PROFILE, GPUS, SLO = Profile.linear(1.0, 5.0, 8), 3, 14.0
RATE = 3 * GPUS * 8 / PROFILE.seconds(8)
COUNT = 600
#: By arrivals, the requests, and how many of them come within an SLO at most.
LOADS = {
    "regular": staggered("m", COUNT, 1 / RATE, SLO),
    "poisson": list(itertools.islice(arrivals({"m": RATE}, {"m": SLO}, 1, 1.0), COUNT)),
    "bursty": list(itertools.islice(arrivals({"m": RATE}, {"m": SLO}, 1, 0.1), COUNT)),
}


class Counting(Driver):
    """Counts after each event what is unanswered and what waits. most: of what was unanswered."""

    def __init__(self, scheduler, requests, delays):
        super().__init__(scheduler)
        self._came = [one.arrival for one in requests]
        self._alone = PROFILE.seconds(1) + delays.margin
        self.most = 0
        self.requests(requests)

    def handled(self):
        left = len(unanswered(self.scheduler))
        running = sum(len(batch.requests) for gpu in self.scheduler._gpus.gpus.values() for batch in gpu.sent)
        assert left <= self._within(SLO), self.now
        assert left - running <= self._within(SLO - self._alone), self.now
        self.most = max(self.most, left)

    def _within(self, seconds):
        """How many requests came within the last ``seconds``. Events of one moment count as all come."""
        return bisect_left(self._came, self.now + SAME_MOMENT_S) - bisect_left(
            self._came, self.now - seconds - SAME_MOMENT_S
        )


@pytest.mark.parametrize("delays", [NO_DELAYS, Delays(0.3)], ids=["at once", "delays"])
@pytest.mark.parametrize("policy", [DEFERRED, EAGER], ids=lambda policy: policy.name)
@pytest.mark.parametrize("gathering", [Fifo, Window, orloj])
@pytest.mark.parametrize("load", LOADS)
def test_no_more_is_unanswered_than_came_within_an_slo(load, gathering, policy, delays):
    requests = LOADS[load]
    run = Counting(Scheduler([Model("m", PROFILE, SLO, gathering, policy, delays)]), requests, delays)
    run.joins(*[0.0] * GPUS)
    run.run()
    assert len(run.refused) > COUNT / 2
    assert not unanswered(run.scheduler)
    if load == "regular":
        assert run.most <= RATE * SLO + 1
