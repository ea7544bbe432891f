"""The work of an event does not grow with the number of GPUs and models but by the logarithm in the heaps.

Counted are the lines of Python that the scheduler's modules run, each change of a heap among them, and the entries of
its tables and heaps that are looked at in another way, for instance by ``min``. So a scan over all GPUs, or over all
models, is seen wherever it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import symphony_serve
from symphony_serve import matching
from symphony_serve.batching.window import Window
from symphony_serve.model_side import Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.twin import Simulation, poisson
from tests.serve.fault_schedules import orloj

ROOM = Path(symphony_serve.__file__).parent
#: The clock and the requests are no work of the scheduler.
OTHERS = str(ROOM / "twin.py")
PROFILE, SLO = Profile.linear(1.0, 5.0, 16), 12.0


class Visits:
    """How many entries of the scheduler's containers were iterated over. (heapq looks into a list by itself.)"""

    def __init__(self):
        self.count = 0
        visits = self

        def counted(iterator):
            for entry in iterator:
                visits.count += 1
                yield entry

        class CountedList(list):
            def __iter__(self):
                return counted(super().__iter__())

            def __contains__(self, wanted):
                return any(entry == wanted for entry in self)

        class CountedDict(dict):
            def __iter__(self):
                return counted(super().__iter__())

            def keys(self):
                return counted(super().keys())

            def values(self):
                return counted(super().values())

            def items(self):
                return counted(super().items())

        self.counted_list, self._dict = CountedList, CountedDict

    def watch(self, owner):
        """Count for all lists and dicts of the object."""
        for name, value in vars(owner).items():
            if type(value) in (list, dict):
                setattr(owner, name, (self.counted_list if type(value) is list else self._dict)(value))


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
    """Lines and visited entries for each event. The load is the same for all numbers."""
    names = [f"m{number}" for number in range(models)]
    scheduler = Counted([Model(name, PROFILE, SLO, gathering) for name in names])
    requests = poisson(dict.fromkeys(names, 4.0 / models), dict.fromkeys(names, SLO), 1)
    simulation = Simulation(scheduler, gpus, requests, 0.0, 60.0)
    table, visits = scheduler._gpus, Visits()
    table.first_idle(0.0)  # Each GPU becomes idle once.
    # All GPUs hold all models, so there is one pool: what is in it counts, but not that it is looked at.
    pools, ready = table.pools, {None: visits.counted_list(scheduler._matching._ready[None])}
    for owner in (scheduler, scheduler._matching, table, *pools.values()):
        visits.watch(owner)
    table.pools, scheduler._matching._ready = pools, ready
    scheduler.events = 0
    run = lines(simulation.run)
    return run / scheduler.events, visits.count / scheduler.events


@pytest.fixture(autouse=True)
def _keep_what_is_outdated(monkeypatch):
    """Else a heap becomes a list that does not count."""
    monkeypatch.setattr(matching, "OUTDATED", 10**9)


@pytest.mark.parametrize("gathering", [Window, orloj])
def test_the_work_of_an_event_does_not_grow_with_gpus_and_models(gathering):
    few = work(32, 20, gathering)
    for gpus, models in ((1024, 20), (32, 320), (1024, 320)):
        run, visited = work(gpus, models, gathering)
        assert run < 1.1 * few[0]
        assert visited == 0, (gpus, models)
