"""GPUs that hold some of the models: each gets batches of those that it holds, in the pure scheduler and its server."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symphony_serve.batching.window import Window
from symphony_serve.delays import Delays
from symphony_serve.errors import ServeError
from symphony_serve.messages import GpuHolds, GpuJoined, Request
from symphony_serve.model_side import DEFERRED, EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.shell.async_server import AsyncServer
from tests.serve.driving import Driver
from tests.serve.stand_ins import HeldDevice

SLO_S = 14.0
NAMES = "abc"


def model(name, policy=EAGER):
    """A batch of b takes b + 5 s (figure 4)."""
    return Model(name, Profile.linear(1.0, 5.0, 8), SLO_S, Window, policy)


MOMENTS = st.floats(0.0, 60.0, allow_nan=False).map(lambda moment: round(moment, 3))
ARRIVALS = st.lists(st.tuples(MOMENTS, st.sampled_from(NAMES)), max_size=60)
POLICIES = st.sampled_from([EAGER, DEFERRED])


def requests_of(arrivals):
    return [Request(number, name, at, at + SLO_S) for number, (at, name) in enumerate(sorted(arrivals), start=1)]


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, POLICIES)
def test_models_on_gpus_of_their_own_are_served_as_if_each_had_a_scheduler_of_its_own(arrivals, policy):
    requests = requests_of(arrivals)
    together = Driver(Scheduler([model(name, policy) for name in NAMES]))
    alone = []
    for gpu, name in enumerate(NAMES, start=1):
        together.at(0.0, GpuJoined(gpu, 1, frozenset(name)))
        one = Driver(Scheduler([model(name, policy)]))
        one.at(0.0, GpuJoined(gpu, 1))
        one.requests(request for request in requests if request.model == name)
        alone.append(one.run())
    together.requests(requests)
    together.run()
    assert sorted(together.batches) == sorted(batch for one in alone for batch in one.batches)


def test_an_idle_gpu_with_fewer_models_goes_first_and_a_ready_model_does_not_wait_for_the_gpu_of_another():
    run = Driver(Scheduler([model(name) for name in NAMES]))
    for gpu, models in ((1, "ab"), (2, "a"), (3, "b")):
        run.at(0.0, GpuJoined(gpu, 1, frozenset(models)))
    run.requests([Request(1, "a", 0.0, 20.0), Request(2, "c", 0.0, 20.0), Request(3, "b", 0.5, 20.0)])
    run.at(1.0, GpuHolds(1, frozenset("c")))
    run.run()
    assert run.batches == [(0.0, 2, [1]), (0.5, 3, [3]), (1.0, 1, [2])]


async def test_a_server_gives_a_device_the_models_that_it_holds():
    delays = Delays(jitter=30.0)
    models = [Model(name, Profile.linear(0.0, 1e-3, 4), 60.0, Window, EAGER, delays) for name in "ab"]
    first, second = HeldDevice("a", opened=True), HeldDevice("b", opened=True)
    with pytest.raises(ServeError, match=r"device 1 has the models \['b'\], expected \['a', 'b'\]$"):
        AsyncServer(models, [first, second], held={0: frozenset("a"), 1: frozenset("ab")})
    async with AsyncServer(models, [first, second], held={0: frozenset("a"), 1: frozenset("b")}) as server:
        assert [await server.ask(*asked) for asked in (("a", 1), ("b", 2))] == [2, 4]
        server.hold(0, frozenset())
        assert (server.able_for("a"), server.able_for("b"), server.able) == (False, True, 2)
        waits = server.ask("a", 1)
        await asyncio.sleep(0.01)
        assert not waits.done()
        second.models = frozenset("ab")
        server.hold(1, frozenset("ab"))
        assert await waits == 2 and (first.runs, second.runs) == ([[1]], [[2], [1]])
