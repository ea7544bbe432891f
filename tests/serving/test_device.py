"""A device and its processes, with stand-ins for them: whose turn it is, and what is left when one is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from fluidtune.serving import device as device_module
from fluidtune.serving import rollouts
from symphony_serve.errors import DeviceLost, ServeError
from tests.serve.driving import PATIENCE_S
from tests.serving.fake_ray import loading
from tests.serving.stand_ins import device

BOTH = {"a": loading("a"), "b@2": loading("b@2")}


@pytest.fixture
async def two():
    """A device that has two models, and their processes."""
    made = device()
    made.want(BOTH)
    assert made.loaded and made.models == {"a", "b@2"}
    yield made, *made.processes.values()
    made.stop()
    assert made.pids == [] and made.processes == {}


async def test_a_device_has_the_processes_that_are_wanted_and_no_other_one(two):
    made, first, second = two
    made.changed = lambda: pytest.fail("nothing has changed")  # Seen: the server was told five times a second.
    made.want(BOTH)
    made.changed = lambda: None
    made.want({"b@2": BOTH["b@2"], "c@3": loading("c@3")})
    assert (first.stopped, list(made.processes)) == (True, ["b@2", "c@3"])
    assert made.processes["b@2"] is second, "what runs goes on"
    with pytest.raises(DeviceLost, match="the process of model a was ended"):  # Seen: what waited for it got 500.
        await made.run("a", [1])
    made.stop()
    made.want(BOTH)
    assert made.processes == {}, "it is over"


async def test_one_batch_runs_at_a_time_whichever_model_has_it(two):
    made, first, _ = two
    first.go.clear()
    running = asyncio.ensure_future(made.run("a", [1]))
    await asyncio.sleep(0)
    others = [asyncio.ensure_future(ask("b@2", [2])) for ask in (made.measure, made.run)]
    await asyncio.sleep(0.01)
    assert not any(other.done() for other in others)
    assert (await asyncio.wait_for(made.measure("b@2", [1], turn=False), PATIENCE_S)).outputs == ["b@21"]
    first.go.set()
    assert await running == (["a1"], 0.5)
    for other in others:
        outputs, waited = await other
        assert outputs == ["b@22"] and waited > 0.5  # Its turn was waited for, and that is no time of the batch.


@pytest.mark.parametrize("how", ["a batch ends it", "it dies while it is idle"])
async def test_a_model_whose_process_is_lost_is_gone_from_the_device_and_the_others_answer(two, how):
    made, _, second = two
    second.mortal, seen = True, []
    made.changed = lambda: seen.append(made.models)
    if how == "a batch ends it":
        with pytest.raises(DeviceLost) as lost:
            await made.run("b@2", [1])
        assert await lost.value.back(), "the device goes on with what it has"
    else:
        await made.check()
    assert (made.models, seen[-1], made.lost) == ({"a"}, {"a"}, False)
    assert (await made.run("a", [1])).outputs == ["a1"]
    second.mortal = False
    second.loads()
    assert seen[-1] == {"a", "b@2"} and (await made.run("b@2", [1])).outputs == ["b@21"]


async def test_a_device_is_lost_with_its_last_process_until_one_is_ready(two):
    made, first, second = two
    first.mortal = second.mortal = True
    with pytest.raises(DeviceLost) as lost:
        await made.check()
    assert made.lost and not await lost.value.back()
    with pytest.raises(DeviceLost):
        await made.run("a", [1])
    back = asyncio.ensure_future(lost.value.back())
    await asyncio.sleep(0)
    second.loads()
    assert await back and made.models == {"b@2"}


async def test_a_model_that_leaves_gets_no_batch_and_keeps_its_process(two):
    made, first, _ = two
    made.leave("a")
    assert (made.models, first.stopped, made.lost) == ({"b@2"}, False, False)
    made.leave("b@2")
    assert made.models == frozenset() and not made.lost
    await made.check()
    made.want({})
    made.want(BOTH)
    assert made.models == {"a", "b@2"}


@pytest.mark.parametrize("ends", ["it is back", "it does not load", "it is not wanted"])
async def test_a_process_that_is_lost_while_it_is_measured_is_waited_for_unless_it_does_not_come_back(two, ends):
    made, _, second = two
    second.mortal = True
    with pytest.raises(DeviceLost, match="killed") as lost:
        await made.measure("b@2", [1])
    assert not await lost.value.back()
    second.mortal = False
    if ends == "it is back":
        second.loads()
        assert await lost.value.back() and (await made.measure("b@2", [1])).outputs == ["b@21"]
        return
    second.fails("no weights") if ends == "it does not load" else made.want({"a": BOTH["a"]})
    with pytest.raises(ServeError, match="no weights" if ends == "it does not load" else "its process was ended"):
        await lost.value.back()


@pytest.mark.serve
async def test_a_batch_that_takes_too_long_while_a_version_is_measured_holds_nobody_up(two, monkeypatch):
    """Seen: a version whose batch of 2 never ends stopped the one that serves for a minute, twice."""
    now = [0.0]
    for module in (rollouts, device_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made, _, second = two
    measured = rollouts._in_turns(made, "b@2", 1.0)

    async def takes_a_turn(seconds):
        """Whether a batch of 2 does, which takes these seconds beside the half one that its process waits."""
        second.go.clear()
        running = asyncio.ensure_future(measured([1, 2]))
        await asyncio.sleep(0)
        other = asyncio.ensure_future(made.run("a", [1]))
        await asyncio.sleep(0.01)
        turn, now[0] = not other.done(), now[0] + seconds + 0.5
        second.go.set()
        await running
        await other
        return turn

    for _ in range(3):
        assert not await takes_a_turn(1.1)
    # What is set up at a first run is no time of the batch.
    assert not await takes_a_turn(0.9) and await takes_a_turn(0.9)
    second.mortal = True
    with pytest.raises(DeviceLost):
        await measured([1, 2])
    second.mortal = False
    second.loads()
    assert not await takes_a_turn(0.9)
