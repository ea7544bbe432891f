"""Which models there are, and which GPU holds which, while requests come: in the pure scheduler and in its server."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symphony_serve.batching.window import Window
from symphony_serve.errors import Refused, ServeError
from symphony_serve.messages import BatchTook, Cancelled, GpuHolds, GpuJoined, ModelGone, ModelRemoved, Reason, Request
from symphony_serve.model_side import DEFERRED, EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.shell.async_server import AsyncServer
from tests.serve.driving import PATIENCE_S, Driver
from tests.serve.stand_ins import HeldDevice, quick

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


def test_what_waits_for_a_model_that_is_removed_is_answered_and_what_comes_is_refused():
    run = Driver(Scheduler([model(name) for name in "ab"]))
    run.joins(0.0)
    run.requests([Request(1, "a", 0.0, 20.0), Request(2, "b", 0.5, 20.0), Request(3, "b", 2.0, 20.0)])
    run.at(1.0, ModelRemoved("b"))
    assert run.run(until=11.0).others == []
    assert run.run(until=12.0).others == [ModelGone("b")]
    assert (run.batches, run.refused) == ([(0.0, 1, [1]), (6.0, 1, [2])], {3: "UNKNOWN_MODEL"})
    late = [BatchTook("b", (Request(2, "b", 0.5, 20.0),), 6.0), Cancelled("b", 2), ModelRemoved("b")]
    assert all(run.scheduler.handle(event, 13.0) == [] for event in late)


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


async def test_a_model_that_was_measured_later_has_the_delays_of_the_server():
    async with AsyncServer([quick("a")], [HeldDevice(*"abc", opened=True)]) as server:
        server.add(quick("b", jitter=20.0))
        too_short = quick("c", 29.0, jitter=0.0)
        with pytest.raises(ServeError, match="model c has an SLO of 29"):
            server.add(too_short)
        assert [await server.ask(name, 1) for name in "ab"] == [2, 2]
        with pytest.raises(Refused, match="no model of that name"):
            await server.ask("c", 1)


async def test_a_server_takes_models_and_lets_them_go_when_their_requests_are_answered():
    """Seen: a KeyError of `hopeless`, `least_latency`, `profile` and `batching` for a model that is not served."""
    device = HeldDevice(*"ab")
    server = AsyncServer([quick("a")], [device])
    with pytest.raises(ServeError, match="device 0 has not the model c"):
        server.add(quick("c"))
    server.add(quick("b"))
    with pytest.raises(ServeError, match="model b is served already"):
        server.add(quick("b"))
    with pytest.raises(ServeError, match="no model unknown is served, expected one of a, b"):
        await asyncio.wait_for(server.remove("unknown"), PATIENCE_S)
    answer = server.ask("b", 1)
    first, *others = (asyncio.ensure_future(server.remove("b")) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    for name in ("unknown", "b"):  # It answers still, and takes no request any more.
        assert server.hopeless(name) is server.hopeless(name, 0.1) is Reason.UNKNOWN_MODEL
        with pytest.raises(Refused, match="no model of that name is served"):
            await server.ask(name, 2)
    assert not any(one.done() for one in others)
    device.open()
    await asyncio.wait_for(asyncio.gather(*others), PATIENCE_S)
    assert (await answer, await server.ask("a", 3)) == (2, 6)
    assert server.hopeless("b") is Reason.UNKNOWN_MODEL and server.least_latency("b") == 0.0
    for asked in (server.profile, server.batching):
        with pytest.raises(ServeError, match=r"no model b is served, expected one of a$"):
            asked("b")
    server.add(quick("b"))
    assert await server.ask("b", 4) == 8 and server.hopeless("a") is None
    gone = asyncio.ensure_future(server.remove("b"))
    await server.close()
    await gone
    await asyncio.wait_for(server.remove("a"), PATIENCE_S)


async def test_a_server_gives_a_device_the_models_that_it_holds():
    models = [quick(name) for name in "ab"]
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
