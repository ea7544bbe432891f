"""The life of a process of a model, whole or in stages, with a Ray that the test holds in its hands."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.serving.process import STATES, State
from symphony_serve.errors import DeviceLost, ServeError
from tests.serve.driving import PATIENCE_S
from tests.serving.fake_ray import SAMPLES, STAGES, FakeRay, One, Staged

PAGE = Path(__file__).parents[2] / "docs" / "serving-decisions.md"
PLAIN = RayTaskError("run", f"{NeedsPlainProcess.__module__}.{NeedsPlainProcess.__qualname__}: reads X", None)
BROKEN = RayActorError(error_msg="Traceback ...\nServeError: the checkpoint of trial t does not load\n")


def test_the_page_draws_exactly_the_table():
    text = PAGE.read_text().split("### The states of a process", 1)[1].split("```", 2)[1]
    arrows = re.findall(r"^ +(\w+) --> (\w+): (.+)$", text, re.MULTILINE)
    drawn = {(begin, cause): end for begin, end, causes in arrows for cause in causes.split(", ")}
    assert drawn == STATES and {begin for begin, _ in STATES} | {*STATES.values()} == set(get_args(State))


async def until(holds):
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0)


@pytest.fixture(params=[One(), Staged()], ids=["whole", "in stages"])
def kind(request):
    return request.param


@pytest.fixture
async def begin(monkeypatch, kind):
    """Begins a process, which loads: it gives that, its Ray, and what is told."""
    ray, told, begun = FakeRay(monkeypatch), [], []

    def begins(forks=None):
        begun.append(
            kind.make(ray, lambda event, **fields: told.append((event, fields["worker"])), lambda: None, forks)
        )
        return begun[0], ray, told

    yield begins
    begun[0].stop()
    await until(lambda: not ray.alive)


@pytest.fixture
async def life(begin, kind):
    """A process that is ready, its Ray, and what is told."""
    one, ray, told = begin()
    ray.say("ready", kind.ready(7))
    await one.loaded()
    return one, ray, told


STARTED, LOST = ("worker_started", "models-1-t-1"), ("worker_lost", "models-1-t-1")


@pytest.mark.parametrize("how", ["a batch ends it", "a batch hangs", "idle it dies", "idle it hangs"])
async def test_a_process_that_is_gone_is_told_killed_and_replaced_and_is_back(life, kind, how):
    one, ray, told = life
    assert (one.samples, one.pids[0], len(ray.alive)) == (SAMPLES, 7, kind.actors)
    before = list(ray.alive)
    if how.startswith("a batch"):
        ray.say("run", RayActorError() if "ends" in how else GetTimeoutError())
        with pytest.raises(DeviceLost) as lost:
            await one.run([1])
        assert not await asyncio.wait_for(lost.value.back(), PATIENCE_S)
    else:
        ray.say("alive", RayActorError() if "dies" in how else GetTimeoutError())
        if "hangs" in how:
            ray.say("alive", GetTimeoutError())
        await one.check()
        await until(lambda: one.state == "loading")
    assert (one.pids, told, len(ray.alive)) == ([], [STARTED, LOST], kind.actors)
    assert not set(before) & set(ray.alive)
    with pytest.raises(DeviceLost, match="no process with model t is ready"):
        await one.run([1])
    ray.say("ready", kind.ready(8))
    await one.loaded()
    assert (one.pids[0], told[2:]) == (8, [("worker_started", "models-1-t-2")])
    ray.say("run", kind.batch(2))
    assert await one.run([1]) == ([(200, "2")], kind.waited)


async def test_an_idle_process_that_does_not_answer_gets_no_batch_until_it_does(life):
    one, ray, told = life
    ray.say("alive", GetTimeoutError())
    assert not await one.answers()
    with pytest.raises(DeviceLost):
        await one.run([1])
    ray.say("alive", None)
    await one.loaded()
    assert (one.pids[0], told) == (7, [STARTED])


async def test_a_process_that_runs_a_batch_is_asked_after_it(life, kind):
    """Else it would be silent if the batch takes longer than an answer may."""
    one, ray, _ = life
    ends = asyncio.get_running_loop().create_future()
    ray.say("run", ends)
    running = asyncio.ensure_future(one.run([1]))
    await asyncio.sleep(0)
    await one.check()
    asked = asyncio.ensure_future(one.answers())
    for _ in range(3):
        await asyncio.sleep(0)
    assert "alive" not in [call[1] for call in ray.asked]
    ray.say("alive", None)
    ends.set_result(kind.batch(2))
    assert await asked and "alive" in [call[1] for call in ray.asked]
    await running


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (RayActorError(), r"a process has ended before it had loaded the model \(.*\); does load end it, or need more"),
        (BROKEN, "^the checkpoint of trial t does not load$"),
        (GetTimeoutError(), "no process has loaded model t within 600 s; is there a free device, and does load end"),
    ],
)
async def test_why_a_process_does_not_load_is_told_once_and_the_next_one_is_tried(begin, kind, answer, said):
    """Seen: each next process ended, and nothing said why."""
    one, ray, told = begin()
    for _ in range(2):
        ray.say("ready", answer)
        with pytest.raises(ServeError, match=said):
            await one.loaded()
    await until(lambda: len([call for call in ray.asked if call[1] == "ready"]) == 3)
    assert told == [LOST] and len(ray.alive) == kind.actors
    ray.say("ready", kind.ready(7))
    await until(lambda: one.state == "ready")
    assert (one.trouble, told[1]) == ("", ("worker_started", "models-1-t-3"))


@pytest.mark.parametrize("what", ["run", "alive"])
async def test_what_the_old_process_was_asked_says_nothing_of_the_next_one(life, kind, what):
    """Seen: a process that had just been started was killed because of what its predecessor had been asked."""
    one, ray, told = life
    late = asyncio.get_running_loop().create_future()
    ray.say(what, late)
    asked = asyncio.ensure_future(one.run([1]) if what == "run" else one.answers())
    await asyncio.sleep(0)
    one._lose("another batch has ended it", one._processes)
    ray.say("ready", kind.ready(8))
    await one.loaded()
    late.set_exception(RayActorError())
    await asyncio.gather(asked, return_exceptions=True)
    assert (one.pids[0], len(told)) == (8, 3)


@pytest.mark.parametrize("what", ["run", "measure", "ready"])
async def test_what_must_be_in_a_plain_process_gets_one(begin, kind, what):
    """Else a size that is measured would be taken to be too large. Seen: `serve start --models` never came up."""
    off = []
    one, ray, _ = begin(SimpleNamespace(turn_off=off.append, runtime_env=lambda: {}))
    if what == "ready":
        ray.say("ready", PLAIN)
    else:
        ray.say("ready", kind.ready(7))
        await one.loaded()
        ray.say(what, PLAIN)
        with pytest.raises(DeviceLost, match="reads X"):
            await getattr(one, what)([1])
    ray.say("ready", kind.ready(8))
    await one.loaded()
    assert (one.pids[0], off, len(ray.alive)) == (8, ["reads X"], kind.actors)


EVENTS = st.sampled_from(["loads", "fails", "dies", "batch dies", "hangs", "answers"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EVENTS, max_size=12))
def test_whatever_dies_there_is_one_process_and_it_is_ready_in_the_end(kind, events):
    """Each change of the state is in the table, whoever asks what meanwhile; and nothing is left after a stop."""

    async def play(monkeypatch):
        ray, states = FakeRay(monkeypatch), ["loading"]
        one = kind.make(ray, lambda event, **fields: None, lambda: states.append(one.state))
        for event in events:
            if event in ("loads", "fails") and one.state == "loading":
                ray.say("ready", kind.ready(7) if event == "loads" else BROKEN)
            elif event == "batch dies" and one.state == "ready":
                ray.say("run", RayActorError())
                await asyncio.wait([asyncio.ensure_future(one.run([1]))])
            elif event in ("dies", "hangs", "answers") and one.state == "ready":
                ray.say("alive", {"dies": RayActorError(), "hangs": GetTimeoutError(), "answers": None}[event])
                await one.check()
            elif event in ("dies", "answers") and one.state == "silent":
                ray.say("alive", RayActorError() if event == "dies" else None)
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(ray.alive) == kind.actors
        if one.state == "silent":
            ray.say("alive", None)
        elif one.state == "loading":
            ray.say("ready", kind.ready(9))
        await until(lambda: one.state == "ready")
        one.stop()
        for _ in range(20):
            await asyncio.sleep(0)
        assert ray.alive == [] and {*itertools.pairwise(states)} <= {(begin, end) for (begin, _), end in STATES.items()}

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(play(monkeypatch))


async def test_a_chain_is_cut_as_before(monkeypatch):
    ray, kind = FakeRay(monkeypatch), Staged()
    one = kind.make(ray, lambda event, **fields: None, lambda: None)
    ray.say("ready", kind.ready(7))
    await one.loaded()
    ray.say("run", RayActorError())
    with pytest.raises(DeviceLost):
        await one.run([1])
    ray.say("ready", kind.ready(9))
    await one.loaded()
    assert (one.pids, ray.asked[-1][2][2].stages) == ([9, 10], STAGES)
    one.stop()
