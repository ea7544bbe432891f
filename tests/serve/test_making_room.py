"""More models than memory: which model comes when it is asked, and what that costs the others, on a virtual clock."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.serve_arrivals import poisson
from benchmarks.serve_twin import MeasuredSimulation
from symphony_serve.making_room import Demand, placed_for
from symphony_serve.messages import GpuHolds, Request, RequestArrived
from symphony_serve.model_side import EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.replacement import Asked, Device, Drop, Dropped, Found, Held, PlacementState, handle
from symphony_serve.scheduler import Scheduler

NOW = 100.0
IDLE, ASKED = Demand(at=NOW, stands=0.0, last=50.0), Demand(at=NOW, stands=0.0, last=99.0, lately=4.0)


@pytest.mark.parametrize(
    ("held", "demands", "missed", "found"),
    [
        # Where there is room nobody leaves; of models that nobody asks, the one that was asked the longest ago.
        (["ab", "a"], dict.fromkeys("ab", replace(IDLE, last=-math.inf)), 1, ["ab", "ac"]),
        (["ab"], {"a": IDLE, "b": replace(IDLE, last=51.0)}, 1, ["bc"]),
        # A place that is in use is paid for, and a copy costs its part.
        (["ab"], {"a": ASKED, "b": ASKED}, 7, None),
        (["ab"], {"a": ASKED, "b": ASKED}, 8, ["bc"]),
        (["ab", "ad"], {"a": ASKED, "b": ASKED, "d": ASKED}, 4, ["bc", "ad"]),
        # What has just come stays for a while.
        (["ab"], {"a": replace(IDLE, stands=99.5), "b": ASKED}, 7, None),
        # The large model e takes two places.
        (["abc"], {"a": IDLE, "b": IDLE, "c": ASKED}, 1, ["ce"]),
        # Seen: all left. Where the large model f leaves, a stays.
        (["af"], {"a": IDLE, "f": replace(IDLE, last=51.0)}, 1, ["ae"]),
    ],
)
def test_who_leaves_for_a_model_that_is_asked(held, demands, missed, found):
    comes = "e" if "e" in "".join(found or "") else "c"
    sizes = {**dict.fromkeys("abcd", 1.0), **dict.fromkeys("ef", 2.0)}
    demands = {**dict.fromkeys(sizes, IDLE), comes: Demand(missed=missed), **demands}
    there = {number: frozenset(models) for number, models in enumerate(held)}
    memory = 3.0 if comes == "e" else 2.0
    placed = placed_for(comes, there, there, sizes, memory, demands)
    assert (placed and ["".join(sorted(models)) for models in placed.values()]) == found


class Loading(MeasuredSimulation):
    """A GPU with room for two of the models a, b and c, each of which loads for ``load`` seconds."""

    def __init__(self, requests, load, measured):
        models = [Model(name, Profile.linear(0.005, 0.01, 16), 1.0, policy=EAGER) for name in "abc"]
        sizes, demands = dict.fromkeys("abc", 1.0), dict.fromkeys("abc", Demand(load))
        state = PlacementState(sizes, 2.0, {0: Device(frozenset("ab"))}, 10.0, {}, demands=demands)
        self.state, _ = handle(state, Found(1, {0: frozenset("ab")}))
        self.load, self.loads, self.flights = load, Counter(), []
        self.counts, self.tick = Counter(), 0.0
        super().__init__(Scheduler(models), 1, requests, 0.0, measured)
        super()._tell(GpuHolds(0, frozenset("ab")), 0.0)

    def _tell(self, event, now):
        while isinstance(event, RequestArrived) and self.tick <= now:
            for flight in [one for one in self.flights if one[0] <= self.tick]:
                self.flights.remove(flight)
                self.hear(flight[1], now)
            self.hear(Asked(self.tick, dict(self.counts)), now)
            self.counts.clear()
            self.tick += 0.2
        super()._tell(event, now)
        if isinstance(event, RequestArrived):
            self.counts[event.request.model] += 1

    def hear(self, event, now):
        self.state, acts = handle(self.state, event)
        for act in acts:
            takes, done = (0.0, Dropped) if isinstance(act, Drop) else (self.load, Held)
            self.loads[act.model] += done is Held
            self.flights.append((self.tick + takes, done(act.device, act.model)))
        super()._tell(GpuHolds(0, self.state.devices[0].held), now)


@pytest.mark.parametrize("load", [0.5, 2.0])
def test_a_model_that_is_asked_little_costs_the_others_less_than_it_misses(load):
    """1 % of the requests are for c. If it came at each of them, half of all were late."""
    requests = poisson({"a": 9.9, "b": 9.9, "c": 0.2}, dict.fromkeys("abc", 1.0), 1)
    run = Loading(requests, load, 2000.0)
    assert 0.01 < run.run().bad_rate <= 0.02
    assert run.loads["c"] >= 2000.0 / (400 * load)


def test_three_models_that_are_asked_alike_share_two_places_and_nobody_starves():
    run = Loading(poisson(dict.fromkeys("abc", 5.0), dict.fromkeys("abc", 1.0), 1), 2.0, 2000.0)
    found = run.run()
    assert all(count.bad_rate < 0.55 for count in found.models.values()) and found.bad_rate < 0.45


def test_a_model_that_is_asked_after_others_comes_at_its_first_request():
    """Each model in turn is asked for a minute: only what comes while it loads is late."""
    turns = (Request(n, "abc"[n // 300 % 3], n / 5, n / 5 + 1.0) for n in range(9000))
    run = Loading(turns, 2.0, 1800.0)
    found = run.run()
    assert found.bad_rate < 3.0 / 60.0 and run.loads.total() <= 31
