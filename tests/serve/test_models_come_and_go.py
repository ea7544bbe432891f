"""Models are added to a scheduler and removed from it while requests come, in the pure scheduler and in its server."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rival_servers.fifo import Fifo
from symphony_serve.batching.window import Window
from symphony_serve.delays import Delays
from symphony_serve.errors import Refused, ServeError
from symphony_serve.messages import (
    BatchTook,
    Cancelled,
    GpuLost,
    ModelAdded,
    ModelGone,
    ModelRemoved,
    Reason,
    Request,
)
from symphony_serve.model_side import DEFERRED, EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.shell.async_server import AsyncServer
from symphony_serve.shell.device import LocalDevice
from tests.serve.driving import PATIENCE_S, Driver
from tests.serve.invariants import unanswered

SLO_S = 14.0


def model(name, gathering=Window, policy=EAGER, **options):
    """A batch of b takes b + 5 s (figure 4)."""
    return Model(name, Profile.linear(1.0, 5.0, 8), SLO_S, gathering, policy, **options)


class Seen(Driver):
    """Also notes when which models are gone."""

    def __init__(self, *models):
        super().__init__(Scheduler(models))
        self.gone = []

    def _carry_out(self, instruction):
        super()._carry_out(instruction)
        if isinstance(instruction, ModelGone):
            self.gone.append((self.now, instruction.model))


MOMENTS = st.floats(0.0, 60.0, allow_nan=False).map(lambda moment: round(moment, 3))
CHANGES = st.lists(st.tuples(MOMENTS, st.sampled_from("bc")), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(MOMENTS, st.sampled_from("abc")), max_size=60),
    CHANGES,
    st.sampled_from([Fifo, Window]),
    st.sampled_from([EAGER, DEFERRED]),
    st.integers(1, 3),
    st.lists(MOMENTS, max_size=2),
)
def test_each_request_is_answered_or_refused_once_whatever_models_come_and_go(
    arrivals, changes, gathering, policy, gpus, losses
):
    """A change adds a model if it is not there, and removes it otherwise. A GPU may be lost, and never come back."""
    run = Seen(model("a", gathering, policy))
    run.joins(*[0.0] * (gpus + len(losses)))
    for number, moment in enumerate(losses, start=gpus + 1):
        run.at(moment, GpuLost(number))
    there, removed = set(), dict.fromkeys("bc", -math.inf)
    for moment, name in sorted(changes):
        if name in there:
            there.remove(name)
            removed[name] = moment
            run.at(moment, ModelRemoved(name))
        elif moment > removed[name] + 2 * SLO_S:  # It is gone.
            there.add(name)
            run.at(moment, ModelAdded(model(name, gathering, policy)))
    requests = [
        Request(number, name, moment, moment + SLO_S) for number, (moment, name) in enumerate(sorted(arrivals), start=1)
    ]
    run.requests(requests)
    run.run()
    answered = [one.id for batch in run.dispatches for one in batch.requests]
    taken_back = len(answered) - len(set(answered))
    assert taken_back == 0 or losses
    assert set(answered) | set(run.refused) == {one.id for one in requests}
    assert losses or not set(answered) & set(run.refused)
    assert not unanswered(run.scheduler)
    for batch in run.dispatches:
        assert {one.model for one in batch.requests} == {batch.model}
    assert {name for _, name in run.gone} == {name for name, moment in removed.items() if moment >= 0}


def test_what_waits_for_a_model_that_is_removed_is_answered_and_what_comes_is_refused():
    run = Seen(model("a"), model("b"))
    run.joins(0.0)
    run.requests([Request(1, "a", 0.0, 20.0), Request(2, "b", 0.5, 20.0), Request(3, "b", 2.0, 20.0)])
    run.at(1.0, ModelRemoved("b"))
    run.run()
    assert run.batches == [(0.0, 1, [1]), (6.0, 1, [2])]
    assert (run.refused, run.gone) == ({3: "UNKNOWN_MODEL"}, [(12.0, "b")])
    late = [BatchTook("b", (Request(2, "b", 0.5, 20.0),), 6.0), Cancelled("b", 2), ModelRemoved("b")]
    assert all(run.scheduler.handle(event, 13.0) == [] for event in late)


class Slow(LocalDevice):
    """Its batches of model b wait to be let go."""

    def __init__(self, release):
        super().__init__({"a": list, "b": list})
        self.release = release

    async def run(self, name, inputs):
        if name == "b":
            await self.release.wait()
        return [f"{name}{value}" for value in inputs]


def quick(name, delays):
    return Model(name, Profile.linear(0.0, 1e-3, 4), 60.0, Fifo, EAGER, delays)


def test_a_model_that_was_measured_later_has_the_delays_of_the_server():
    async def run():
        device = LocalDevice({"a": list, "b": list, "c": list})
        async with AsyncServer([quick("a", Delays(jitter=30.0))], [device]) as server:
            server.add(quick("b", Delays(response=0.1, jitter=20.0)))
            too_short = Model("c", Profile.linear(0.0, 1e-3, 4), 29.0, Fifo, EAGER, Delays())
            with pytest.raises(ServeError, match="model c has an SLO of 29"):
                server.add(too_short)
            assert [await server.ask(name, 1) for name in "ab"] == [1, 1]
            with pytest.raises(Refused, match="no model of that name"):
                await server.ask("c", 1)
        device.close()

    asyncio.run(run())


def test_a_server_takes_models_and_lets_them_go_when_their_requests_are_answered():
    """Seen: `hopeless`, `wait`, `profile` and `batching` ended with a KeyError for a model that is not served."""

    async def run():
        delays, release = Delays(jitter=30.0), asyncio.Event()

        server = AsyncServer([quick("a", delays)], [Slow(release)])
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
        release.set()
        await asyncio.wait_for(asyncio.gather(*others), PATIENCE_S)
        assert (await answer, await server.ask("a", 3)) == ("b1", "a3")
        assert server.hopeless("b") is Reason.UNKNOWN_MODEL and server.wait("b") == 0.0
        for asked in (server.profile, server.batching):
            with pytest.raises(ServeError, match=r"no model b is served, expected one of a$"):
                asked("b")
        server.add(quick("b", delays))
        assert await server.ask("b", 4) == "b4" and server.hopeless("a") is None
        gone = asyncio.ensure_future(server.remove("b"))
        await server.close()
        await gone
        await asyncio.wait_for(server.remove("a"), PATIENCE_S)

    asyncio.run(run())
