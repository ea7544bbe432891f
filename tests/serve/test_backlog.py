"""What waits before a request: a bound from below, that is never above what the scheduler then needs."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.rival_servers.fifo import Fifo
from symphony_serve.backlog import Backlog
from symphony_serve.batching.window import Window
from symphony_serve.messages import Dispatch, Request
from symphony_serve.model_side import DEFERRED, EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from tests.serve.driving import Driver

#: Batches of 1, 2, 3 and 4 requests take 2, 3, 4 and 9 s: a batch of 3 takes the fewest for each, 4/3 s.
TABLE = Profile.from_seconds([2.0, 3.0, 4.0, 9.0])


def test_the_fastest_batch_and_what_runs_count():
    backlog = Backlog({"m": TABLE, "n": TABLE}, {"m": 10.0, "n": 3.5})
    assert backlog.seconds("m", [0], 0.0) == pytest.approx(4 / 3)
    assert backlog.seconds("n", [0], 0.0) == pytest.approx(3 / 2)  # A batch of 3 would not end within 3.5 s.
    for _ in range(5):
        backlog.waits("m")
    assert backlog.seconds("m", [0], 0.0) == pytest.approx(6 * 4 / 3)
    assert backlog.seconds("m", [0, 1], 0.0) == pytest.approx(3 * 4 / 3)
    assert backlog.seconds("n", [0], 0.0) == pytest.approx(3 / 2), "what waits for others need not go first"
    assert backlog.seconds("m", [0], 0.0, 10) == pytest.approx(15 * 4 / 3)
    backlog.sent(1, 7.0)
    assert backlog.seconds("m", [0, 1], 3.0) == pytest.approx(2.0 + 3 * 4 / 3)
    assert backlog.seconds("m", [0], 3.0) == pytest.approx(6 * 4 / 3)
    assert backlog.seconds("m", [0, 1], 8.0) == pytest.approx(3 * 4 / 3), "a batch that is overdue ends at once"
    backlog.done(1)
    backlog.waits_no_more("m")
    assert backlog.seconds("m", [0, 1], 3.0) == pytest.approx(5 / 2 * 4 / 3)
    backlog.set_profile("m", Profile.linear(0.0, 1.0, 5))
    assert backlog.seconds("m", [0], 3.0) == pytest.approx(5 / 5)
    assert backlog.seconds("m", [], 3.0) == math.inf
    backlog.set_profile("m", Profile.linear(0.0, 9.0, 1))
    assert backlog.alone["m"] == 2.0, "the first profile leaves room for a try"
    backlog.waits("unknown")
    backlog.waits_no_more("unknown")
    assert backlog.waiting == {"m": 4, "n": 0}


class Counted(Driver):
    """Tells a backlog what happens, and asks it at each arrival. bounds: by request, the moment that it tells."""

    def __init__(self, scheduler: Scheduler, models: list[Model], gpus: int):
        super().__init__(scheduler)
        self.gpus = range(1, gpus + 1)
        self.backlog = Backlog({one.name: one.profile for one in models}, {one.name: one.slo for one in models})
        self.bounds: dict[int, float] = {}
        self.joins(*[0.0] * gpus)

    def ask(self, request: Request) -> None:
        self.run(request.arrival)
        self.bounds[request.id] = request.arrival + self.backlog.seconds(request.model, self.gpus, request.arrival)
        self.backlog.waits(request.model)
        self.requests([request])

    def _carry_out(self, instruction) -> None:
        super()._carry_out(instruction)
        if isinstance(instruction, Dispatch):
            self.backlog.sent(instruction.gpu, instruction.start + instruction.seconds)
            for request in instruction.requests:
                self.backlog.waits_no_more(request.model)


@given(
    gpus=st.integers(1, 3),
    gaps=st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 2.0]), min_size=1, max_size=40),
    seconds=st.lists(st.floats(0.1, 3.0), min_size=1, max_size=6),
    two_models=st.booleans(),
    policy=st.sampled_from([EAGER, DEFERRED]),
    gathering=st.sampled_from([Fifo, Window]),
)
def test_no_request_is_answered_sooner_than_its_bound(gpus, gaps, seconds, two_models, policy, gathering):
    """As long as nothing before it is refused: the SLO leaves time for all of them, one after the other."""
    slo = 10.0 + 3.0 * (len(gaps) + 1)
    names = ["m", "n"] if two_models else ["m"]
    models = [Model(name, Profile.from_seconds(sorted(seconds)), slo, gathering, policy) for name in names]
    driver = Counted(Scheduler(models), models, gpus)
    for number, arrival in enumerate(itertools.accumulate(gaps)):
        driver.ask(Request(number, names[number % len(names)], arrival, arrival + slo))
    driver.run()
    # Two models that both wait for the last moment may find one GPU there.
    assume(policy is EAGER or not two_models or not driver.refused)
    assert not driver.refused
    assert driver.backlog.waiting == dict.fromkeys(names, 0)
    for batch in driver.dispatches:
        for request in batch.requests:
            assert batch.start + batch.seconds >= driver.bounds[request.id] - 1e-6
