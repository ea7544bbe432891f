"""The life of a process of a model, whole or in stages, with a Ray that the test holds in its hands."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.serving import process as process_module
from fluidtune.serving.loaded_model import Packed
from fluidtune.serving.model_process import Passed, Started
from fluidtune.serving.process import STATES, State
from symphony_serve.errors import DeviceLost, ServeError
from tests.drawings import changes_of
from tests.serve.driving import PATIENCE_S, reached
from tests.serving.fake_ray import SAMPLES, STAGES, FakeRay, One, Staged

PLAIN = RayTaskError("run", f"{NeedsPlainProcess.__module__}.{NeedsPlainProcess.__qualname__}: reads X", None)
BROKEN = RayActorError(error_msg="Traceback ...\nServeError: the checkpoint of trial t does not load\n")


def test_the_page_draws_exactly_the_table():
    changes = changes_of("serving-decisions.md", "### The states of a process")
    drawn = {(begin, cause): end for begin, end, cause in changes}
    assert drawn == STATES and {begin for begin, _ in STATES} | {*STATES.values()} == set(get_args(State))


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
    await reached(lambda: not ray.alive)


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
        await reached(lambda: one.state == "loading")
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
    ends = future()
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
    await reached(lambda: len([call for call in ray.asked if call[1] == "ready"]) == 3)
    assert told == [LOST] and len(ray.alive) == kind.actors
    ray.say("ready", kind.ready(7))
    await reached(lambda: one.state == "ready")
    assert (one.trouble, told[1]) == ("", ("worker_started", "models-1-t-3"))


@pytest.mark.parametrize("what", ["run", "alive"])
async def test_what_the_old_process_was_asked_says_nothing_of_the_next_one(life, kind, what):
    """Seen: a process that had just been started was killed because of what its predecessor had been asked."""
    one, ray, told = life
    late = future()
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
        await reached(lambda: one.state == "ready")
        one.stop()
        for _ in range(20):
            await asyncio.sleep(0)
        assert ray.alive == [] and {*itertools.pairwise(states)} <= {(begin, end) for (begin, _), end in STATES.items()}

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(play(monkeypatch))


# A chain, beside what it shares with a process of a whole model: who is asked, and the order of batches.

FAILED = Passed(None, 2, (), (500, '{"error": "the model failed: no"}'))
passed = Staged().batch


@pytest.fixture
async def chain(monkeypatch):
    """A chain of two that is ready, and its Ray. Batches need not wait for each other."""
    ray = FakeRay(monkeypatch)
    made = Staged().make(ray, lambda event, **fields: None, lambda: None)
    ray.say("ready", Staged().ready(7))
    await made.loaded()
    yield made, ray
    made.stop()


def future():
    return asyncio.get_running_loop().create_future()


async def test_a_chain_is_cut_as_before(chain):
    made, ray = chain
    ray.say("run", RayActorError())
    with pytest.raises(DeviceLost):
        await made.run([1])
    ray.say("ready", Staged().ready(9))
    await made.loaded()
    assert (made.pids, ray.asked[-1][2][2].stages) == ([9, 10], STAGES)


async def test_what_one_process_answers_goes_to_the_next_one(chain):
    made, ray = chain
    ray.say("run", passed(3))
    assert (await made.run([1])).outputs == [(200, "3")]
    assert ray.asked == [
        ("2", "ready", ("1", "ready", Started())),
        ("2", "run", ("1", "run", Passed([Packed.of(1)], 1))),
    ]
    assert (made.pids, made.stages) == ([7, 8], list(STAGES))


@pytest.mark.parametrize("lost", [False, True])
async def test_a_batch_that_has_left_the_first_process_is_told_before_its_answer(chain, lost):
    made, ray = chain
    answer, heard = future(), []
    ray.say("run", answer)
    task = asyncio.create_task(made.run([1], lambda: heard.append(task.done())))
    await asyncio.sleep(0.01)
    assert ray.asked[-1] == ("2", "run", ("1", "run_first", Passed([Packed.of(1)], 1)))
    ray.left.set_exception(RayActorError()) if lost else ray.left.set_result(None)
    await asyncio.sleep(0.01)
    answer.set_result(passed(3))
    assert (await task).outputs == [(200, "3")] and heard == ([] if lost else [False])


@pytest.mark.parametrize("fails", [False, True])
async def test_batches_return_in_their_order_also_when_inputs_are_tried_alone(chain, fails):
    """Seen: requests behind such a batch were run twice, or refused as `gpu_lost`."""
    made, ray = chain
    first, alone = future(), future()
    for answer in (first, passed(9), alone, passed(5)):
        ray.say("run", answer)
    ended = []
    for name, inputs in (("first", [2, 3]), ("next", [4])):
        task = asyncio.create_task(made.run(inputs))
        task.add_done_callback(lambda task, name=name: ended.append((name, task.result().outputs)))
    await asyncio.sleep(0.01)
    first.set_result(FAILED if fails else passed(4, 5))
    await asyncio.sleep(0.01)
    assert not (fails and ended)
    alone.set_result(passed(4))
    while len(ended) < 2:
        await asyncio.sleep(0.001)
    assert ended == [("first", [(200, "4"), (200, "5")]), ("next", [(200, "9")])]


async def test_if_a_batch_fails_each_of_its_inputs_is_tried_alone_and_a_measurement_fails(chain):
    made, ray = chain
    for answer in (FAILED, passed(4), FAILED):
        ray.say("run", answer)
    ray.say("measure", FAILED)
    assert (await made.run([2, 3])).outputs == [(200, "4"), FAILED.failed]
    with pytest.raises(ServeError, match=r"^the model failed: no$"):
        await made.measure([2, 3])


async def test_what_a_batch_stands_behind_the_inputs_of_another_is_no_time_of_its_own(chain):
    """The profile learns seconds less those that a batch has stood. Seen: good requests were refused."""
    made, ray = chain
    fails, alone = future(), future()
    for answer in (fails, passed(9), alone, passed(5)):
        ray.say("run", answer)
    _, other = (asyncio.create_task(made.run(inputs)) for inputs in ([2, 3], [4]))
    await asyncio.sleep(0.01)
    fails.set_result(FAILED)
    await asyncio.sleep(0.2)
    alone.set_result(passed(4))
    assert (await other).seconds >= 0.2


async def test_what_a_batch_has_stood_before_stages_is_told(chain, monkeypatch):
    """The clock stands: the seconds that the stages tell are taken from it."""
    made, ray = chain
    monkeypatch.setattr(process_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    first = future()
    ray.say("run", first)
    ray.say("run", Passed([(200, "1")], 1, (-9.0,)))
    one, other = (asyncio.create_task(made.run([1])) for _ in range(2))
    await asyncio.sleep(0.01)
    first.set_result(Passed([(200, "1")], 1, (-2.0, -3.0)))
    assert ((await one).seconds, (await other).seconds) == (0.0, 9.0 - 2.5)
