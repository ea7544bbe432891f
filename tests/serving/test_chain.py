"""A chain of stages, beside what it shares with a process of a whole model: who is asked, and the order of batches."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from fluidtune.serving import process as process_module
from fluidtune.serving.loaded_model import Packed
from fluidtune.serving.model_process import Passed, Started
from symphony_serve.errors import ServeError
from tests.serving.fake_ray import STAGES, FakeRay, Staged

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
