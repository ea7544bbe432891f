"""How long requests wait: overload grows no queue, and a bound from below says when what waits before one has run.

At three times the load that the GPUs bear, what is unanswered came within the last SLO. So the bound is the number of
requests that came in the last SLO, counted: rate times SLO and one for regular arrivals, more by the burstiness of the
arrivals where these come in bursts. It includes what runs. Of it, what waits came within the last SLO less the time of
a batch of 1, since what is older can only be late.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.rival_servers.fifo import Fifo
from benchmarks.serve_arrivals import arrivals
from symphony_serve.batching.window import Window
from symphony_serve.delays import NO_DELAYS, Delays
from symphony_serve.messages import SAME_MOMENT_S, Request
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


# The bound from below.

#: Batches of 1, 2, 3 and 4 requests take 2, 3, 4 and 9 s: a batch of 3 takes the fewest for each, 4/3 s.
TABLE = Profile.from_seconds([2.0, 3.0, 4.0, 9.0])


def test_the_fastest_batches_and_what_runs_count():
    """With SLOs of 30 and 3.5 s. A batch of 3 would not end within 3.5 s."""
    run = Driver(Scheduler([Model("m", TABLE, 30.0, Fifo, EAGER), Model("n", TABLE, 3.5, Fifo, EAGER)]))
    least, each = run.scheduler.least_latency, 4 / 3
    assert (least("m", 1, 0.0), least("n", 1, 0.0), least("m", 0, 0.0)) == (each, 3 / 2, math.inf)
    run.joins(0.0)
    run.requests(Request(number, "m", 0.1 * number, 30.0) for number in range(6))
    run.run(1.0)  # The first one runs until 2, and the others wait.
    assert least("m", 1, 1.0) == pytest.approx(1.0 + 6 * each)
    assert least("m", 2, 1.0, 10) == pytest.approx((1.0 + 15 * each) / 2)
    assert least("n", 1, 1.0) == pytest.approx(1.0 + 3 / 2), "what waits for others need not go first"
    assert least("m", 1, 8.0) == pytest.approx(6 * each), "a batch that is overdue ends at once"


class Counted(Driver):
    """Asks at each arrival what waits. bounds: by request, the moment that is said."""

    def __init__(self, scheduler: Scheduler, gpus: int):
        super().__init__(scheduler)
        self.gpus, self.bounds = gpus, dict[int, float]()
        self.joins(*[0.0] * gpus)

    def ask(self, request: Request) -> None:
        self.run(request.arrival)
        least = self.scheduler.least_latency(request.model, self.gpus, request.arrival)
        self.bounds[request.id] = request.arrival + least
        self.requests([request])


@given(
    gpus=st.integers(1, 3),
    gaps=st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 2.0]), min_size=1, max_size=40),
    seconds=st.lists(st.floats(0.1, 3.0), min_size=1, max_size=6),
    two_models=st.booleans(),
    policy=st.sampled_from([EAGER, DEFERRED]),
    gathering=st.sampled_from([Fifo, Window]),
)
def test_what_was_asked_has_not_all_run_sooner_than_the_bound(gpus, gaps, seconds, two_models, policy, gathering):
    """As long as nothing before it is refused: the SLO leaves time for all of them, one after the other.

    Seen: the last of seven was answered sooner, while the other GPU ran a larger batch with some before it.
    """
    slo = 10.0 + 3.0 * (len(gaps) + 1)
    names = ["m", "n"] if two_models else ["m"]
    models = [Model(name, Profile.from_seconds(sorted(seconds)), slo, gathering, policy) for name in names]
    driver = Counted(Scheduler(models), gpus)
    for number, arrival in enumerate(itertools.accumulate(gaps)):
        driver.ask(Request(number, names[number % len(names)], arrival, arrival + slo))
    driver.run()
    # Two models that both wait for the last moment may find one GPU there.
    assume(policy is EAGER or not two_models or not driver.refused)
    assert not driver.refused
    ran = {one.id: (batch.model, batch.start + batch.seconds) for batch in driver.dispatches for one in batch.requests}
    for number, (model, _) in ran.items():
        through = max(end for other, (its, end) in ran.items() if its == model and other <= number)
        assert through >= driver.bounds[number] - 1e-6
