"""Models are added to a scheduler and removed from it while requests come, in the pure scheduler and in its server."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.rival_servers.fifo import Fifo
from symphony_serve.batching.window import Window
from symphony_serve.delays import Delays
from symphony_serve.errors import Refused, ServeError
from symphony_serve.messages import BatchTook, Cancelled, ModelGone, ModelRemoved, Reason, Request
from symphony_serve.model_side import EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.shell.async_server import AsyncServer
from tests.serve.driving import PATIENCE_S, Driver
from tests.serve.stand_ins import HeldDevice


def test_what_waits_for_a_model_that_is_removed_is_answered_and_what_comes_is_refused():
    """A batch of b takes b + 5 s (figure 4)."""
    run = Driver(Scheduler([Model(name, Profile.linear(1.0, 5.0, 8), 14.0, Window, EAGER) for name in "ab"]))
    run.joins(0.0)
    run.requests([Request(1, "a", 0.0, 20.0), Request(2, "b", 0.5, 20.0), Request(3, "b", 2.0, 20.0)])
    run.at(1.0, ModelRemoved("b"))
    assert run.run(until=11.0).others == []
    assert run.run(until=12.0).others == [ModelGone("b")]
    assert (run.batches, run.refused) == ([(0.0, 1, [1]), (6.0, 1, [2])], {3: "UNKNOWN_MODEL"})
    late = [BatchTook("b", (Request(2, "b", 0.5, 20.0),), 6.0), Cancelled("b", 2), ModelRemoved("b")]
    assert all(run.scheduler.handle(event, 13.0) == [] for event in late)


def quick(name, delays):
    return Model(name, Profile.linear(0.0, 1e-3, 4), 60.0, Fifo, EAGER, delays)


async def test_a_model_that_was_measured_later_has_the_delays_of_the_server():
    async with AsyncServer([quick("a", Delays(jitter=30.0))], [HeldDevice(*"abc", opened=True)]) as server:
        server.add(quick("b", Delays(response=0.1, jitter=20.0)))
        too_short = Model("c", Profile.linear(0.0, 1e-3, 4), 29.0, Fifo, EAGER, Delays())
        with pytest.raises(ServeError, match="model c has an SLO of 29"):
            server.add(too_short)
        assert [await server.ask(name, 1) for name in "ab"] == [2, 2]
        with pytest.raises(Refused, match="no model of that name"):
            await server.ask("c", 1)


async def test_a_server_takes_models_and_lets_them_go_when_their_requests_are_answered():
    """Seen: `hopeless`, `wait`, `profile` and `batching` ended with a KeyError for a model that is not served."""
    delays, device = Delays(jitter=30.0), HeldDevice(*"ab")
    server = AsyncServer([quick("a", delays)], [device])
    with pytest.raises(ServeError, match="device 0 has not the model c"):
        server.add(quick("c", delays))
    server.add(quick("b", delays))
    with pytest.raises(ServeError, match="model b is served already"):
        server.add(quick("b", delays))
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
    assert server.hopeless("b") is Reason.UNKNOWN_MODEL and server.wait("b") == 0.0
    for asked in (server.profile, server.batching):
        with pytest.raises(ServeError, match=r"no model b is served, expected one of a$"):
            asked("b")
    server.add(quick("b", delays))
    assert await server.ask("b", 4) == 8 and server.hopeless("a") is None
    gone = asyncio.ensure_future(server.remove("b"))
    await server.close()
    await gone
    await asyncio.wait_for(server.remove("a"), PATIENCE_S)
