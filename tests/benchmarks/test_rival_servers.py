"""The baselines: their rules by hand, and that each answers or refuses every request."""

from __future__ import annotations

import pytest

from benchmarks.rival_servers.clipper import Clipper
from benchmarks.rival_servers.clockwork import Clockwork
from benchmarks.rival_servers.nexus import Nexus, plan
from benchmarks.rival_servers.serve_batch import ServeBatch
from benchmarks.rival_servers.shepherd import Preempt, PreemptiveSimulation, Shepherd
from benchmarks.serve_arrivals import arrivals
from symphony_serve.messages import (
    BatchDone,
    Dispatch,
    GpuJoined,
    Request,
    RequestArrived,
    Tick,
    WakeAt,
)
from symphony_serve.model_side import Model
from symphony_serve.profiles import Profile

MODEL = Model("m", Profile.linear(1.0, 5.0, 16), 12.0)
#: Table 2's first workload, in ms.
TABLE_2 = Model("m", Profile.linear(1.053, 5.072, 64), 25.0)


def batches(server, deadlines, now=0.0):
    """What a server with one idle GPU sends for requests 1, 2, 3 and so on of these deadlines that come at 0."""
    server.handle(GpuJoined(0, 1), 0.0)
    for number, deadline in enumerate(deadlines, start=1):
        server.handle(RequestArrived(Request(number, "m", 0.0, deadline)), 0.0)
    sent = [one for one in server.handle(Tick(), now) if isinstance(one, Dispatch)]
    return [[request.id for request in one.requests] for one in sent]


def test_clockwork_takes_the_batch_that_must_start_soonest():
    """By d - l(b), the SLO 0.005 shorter: [1] 4, [2, 3] 3, [3] 4. All three in one batch would be too late."""
    assert batches(Clockwork([MODEL]), (10.005, 10.005, 10.005)) == [[1, 2, 3]]
    assert batches(Clockwork([MODEL]), (6.005, 10.005, 10.005)) == [[1]]
    assert batches(Clockwork([MODEL]), (7.505, 10.005, 10.005)) == [[1, 2]]


def test_shepherd_begins_with_the_earliest_deadline_or_with_the_largest_batch():
    deadlines = (6.0, 12.0, 12.0, 12.0)
    assert batches(Shepherd([MODEL]), deadlines) == [[1]]
    assert batches(Shepherd([MODEL], heads=False), deadlines) == [[2, 3, 4]]


def test_shepherd_stops_a_batch_for_one_that_is_more_than_three_times_as_large():
    server = Shepherd([MODEL])
    assert batches(server, (30.0,)) == [[1]]
    for number in range(2, 5):
        assert server.handle(RequestArrived(Request(number, "m", 1.0, 31.0)), 1.0) == []
    assert server.handle(RequestArrived(Request(5, "m", 1.0, 31.0)), 1.0) != []
    stopped, sent = server.handle(Tick(), 1.0)
    assert stopped == Preempt(0, 0)
    assert [request.id for request in sent.requests] == [1, 2, 3, 4, 5]
    assert not [one for one in server.handle(BatchDone(0, 1, 0), 6.0) if isinstance(one, Dispatch)]


def test_clipper_grows_by_one_and_shrinks_by_a_tenth():
    server = Clipper([MODEL])
    assert batches(server, [12.0] * 40) == [[1]]
    sizes, now, sent = [], 6.0, server._running[0]
    for _ in range(12):
        server.handle(BatchDone(0, 1, sent.plan), now)
        (sent,) = server.handle(Tick(), now)
        sizes.append(len(sent.requests))
        now += sent.seconds
        server.handle(RequestArrived(Request(1000 + int(now * 100), "m", now, now + 12)), now)
        if sizes[-1] == 8:
            break
    assert sizes == [2, 3, 4, 5, 6, 7, 8]
    server.handle(BatchDone(0, 1, sent.plan), now)
    assert server._sizes["m"] == pytest.approx(8 * 0.9)


class TestServeBatch:
    """The rule of `serve.batch`: batches of 2 at most, a wait of 3 s."""

    def server(self, most=None):
        server = ServeBatch([MODEL], 2, 3.0, most)
        server.handle(GpuJoined(0, 1), 0.0)
        server.handle(RequestArrived(Request(1, "m", 0.0, 12.0)), 0.0)
        return server

    def sent(self, told):
        return [[request.id for request in one.requests] for one in told if isinstance(one, Dispatch)]

    def test_a_batch_starts_when_it_is_full(self):
        server = self.server()
        assert server.handle(Tick(), 0.0) == [WakeAt(3.0)]
        assert server.handle(RequestArrived(Request(2, "m", 1.0, 13.0)), 1.0) == [WakeAt(1.0)]
        assert self.sent(server.handle(Tick(), 1.0)) == [[1, 2]]

    def test_a_batch_starts_when_its_first_request_has_waited(self):
        assert self.sent(self.server().handle(Tick(), 3.0)) == [[1]]


class TestNexus:
    def test_a_rate_that_fills_gpus(self):
        """Golden example 3: 4500.5/s on 8 GPUs with batches of 7."""
        nodes = plan({"m": TABLE_2}, {"m": 4.0}, 8)
        assert [[(one.size, round(one.rate, 4)) for one in node.sessions] for node in nodes] == [[(7, 0.5626)]] * 8


@pytest.mark.parametrize(
    "make",
    [
        lambda models: Nexus(models, {"a": 0.4, "b": 0.2}),
        Clockwork,
        Shepherd,
        lambda models: Shepherd(models, heads=False),
        Clipper,
        lambda models: ServeBatch(models, 8, 1.5, 16),
    ],
)
@pytest.mark.parametrize("load", [0.3, 3.0])
def test_every_request_is_answered_or_refused_once(make, load):
    """The simulation counts each request once, and fails if one is left."""
    models = [Model(name, Profile.linear(1.0, 5.0, 16), 12.0) for name in "ab"]
    rates = {"a": 0.4 * load, "b": 0.2 * load}
    requests = list(zip(range(300), arrivals(rates, dict.fromkeys("ab", 12.0), 1, 0.4), strict=False))
    last = requests[-1][1].arrival
    simulation = PreemptiveSimulation(make(models), 3, iter([one for _, one in requests]), 0.0, last)
    outcome = simulation.run()
    assert sum(count.total for count in outcome.models.values()) == 300
    if load < 1:
        assert outcome.bad_rate < 0.4
    assert max(outcome.busy.values()) <= last * (1 + 1e-9)
