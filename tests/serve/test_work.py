"""The work of an event does not grow with the number of GPUs and models but by the logarithm in the heaps.

Counted are the lines of Python that the scheduler's modules run, each change of a heap and each step of a comprehension
among them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import symphony_serve
from benchmarks.serve_arrivals import poisson
from symphony_serve.batching.window import Window
from symphony_serve.model_side import Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.twin import Simulation
from tests.serve.fault_schedules import orloj

ROOM = Path(symphony_serve.__file__).parent
#: The clock and the requests are no work of the scheduler.
OTHERS = str(ROOM / "twin.py")
PROFILE, SLO = Profile.linear(1.0, 5.0, 16), 12.0


def lines(run: Callable[[], object]) -> int:
    """The lines of the scheduler's modules that the call runs."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        file = frame.f_code.co_filename
        if not file.startswith(str(ROOM)) or file == OTHERS:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


class Counted(Scheduler):
    """Counts its events."""

    events = 0

    def handle(self, event, now):
        self.events += 1
        return super().handle(event, now)


def work(gpus, models, gathering=Window):
    """Lines for each event. The load is the same for all numbers."""
    names = [f"m{number}" for number in range(models)]
    scheduler = Counted([Model(name, PROFILE, SLO, gathering) for name in names])
    requests = poisson(dict.fromkeys(names, 4.0 / models), dict.fromkeys(names, SLO), 1)
    simulation = Simulation(scheduler, gpus, requests, 0.0, 60.0)
    scheduler.events = 0
    return lines(simulation.play) / scheduler.events


@pytest.mark.parametrize("gathering", [Window, orloj])
def test_the_work_of_an_event_does_not_grow_with_gpus_and_models(gathering):
    few = work(32, 20, gathering)
    for gpus, models in ((1024, 20), (32, 320), (1024, 320)):
        assert work(gpus, models, gathering) < 1.1 * few, (gpus, models)
