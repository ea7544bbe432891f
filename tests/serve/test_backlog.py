"""What waits before a request: a bound from below of when it and all that waits before it have run."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.rival_servers.fifo import Fifo
from symphony_serve.batching.window import Window
from symphony_serve.messages import Request
from symphony_serve.model_side import DEFERRED, EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from tests.serve.driving import Driver

#: Batches of 1, 2, 3 and 4 requests take 2, 3, 4 and 9 s: a batch of 3 takes the fewest for each, 4/3 s.
TABLE = Profile.from_seconds([2.0, 3.0, 4.0, 9.0])


def test_the_fastest_batches_and_what_runs_count():
    """With SLOs of 30 and 3.5 s. A batch of 3 would not end within 3.5 s."""
    run = Driver(Scheduler([Model("m", TABLE, 30.0, Fifo, EAGER), Model("n", TABLE, 3.5, Fifo, EAGER)]))
    wait, each = run.scheduler.wait, 4 / 3
    assert (wait("m", 1, 0.0), wait("n", 1, 0.0), wait("m", 0, 0.0)) == (each, 3 / 2, math.inf)
    run.joins(0.0)
    run.requests(Request(number, "m", 0.1 * number, 30.0) for number in range(6))
    run.run(1.0)  # The first one runs until 2, and the others wait.
    assert wait("m", 1, 1.0) == pytest.approx(1.0 + 6 * each)
    assert wait("m", 2, 1.0, 10) == pytest.approx((1.0 + 15 * each) / 2)
    assert wait("n", 1, 1.0) == pytest.approx(1.0 + 3 / 2), "what waits for others need not go first"
    assert wait("m", 1, 8.0) == pytest.approx(6 * each), "a batch that is overdue ends at once"


class Counted(Driver):
    """Asks at each arrival what waits. bounds: by request, the moment that is said."""

    def __init__(self, scheduler: Scheduler, gpus: int):
        super().__init__(scheduler)
        self.gpus, self.bounds = gpus, dict[int, float]()
        self.joins(*[0.0] * gpus)

    def ask(self, request: Request) -> None:
        self.run(request.arrival)
        wait = self.scheduler.wait(request.model, self.gpus, request.arrival)
        self.bounds[request.id] = request.arrival + wait
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
