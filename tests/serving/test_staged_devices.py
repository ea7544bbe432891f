"""The front's side of a group of processes, with a Ray that the test holds in its hands."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from fluidtune.serving import remote_devices, staged_devices
from fluidtune.serving.loaded_model import Packed, Samples
from fluidtune.serving.model_layers import Stage
from fluidtune.serving.model_process import Loading
from fluidtune.serving.staged_devices import StagedDevice
from fluidtune.serving.staged_process import Passed, Started
from symphony_serve.errors import DeviceLost, ServeError

STAGES = (Stage(0, 1, 1.0, 8, 4), Stage(1, 3, 1.0, 8, 4))


class Cluster:
    """Stands for Ray. What an actor is asked is its name and what it got. said: what `fetched` gives, in this order."""

    def __init__(self):
        self.asked, self.killed, self.said = [], [], asyncio.Queue()
        self._made = 0

    def remote(self, actor_class):
        return self

    def options(self, **given):
        def start(loading, number, count, room):
            self._made += 1
            name = f"{self._made}-{number}"
            call = {
                what: SimpleNamespace(remote=lambda got, what=what: (name, what, got))
                for what in ("ready", "run", "alive")
            }
            run_first = SimpleNamespace(options=lambda **given: self.first(name))
            return SimpleNamespace(name=name, run_first=run_first, **call)

        return SimpleNamespace(remote=start)

    def first(self, name):
        """The call of a first stage that returns two things; the test answers the second by ``left``."""
        self.left = Future()
        future = SimpleNamespace(future=lambda: self.left)
        return SimpleNamespace(remote=lambda got: ((name, "run_first", got), future))

    def kill(self, actor):
        self.killed.append(actor.name)

    async def fetched(self, reference, wait_s):
        """The chain that was asked, and later its answer."""
        self.asked.append(reference)
        answer = self.answers.pop(0)
        answer = await answer if asyncio.isfuture(answer) else answer
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def in_group(monkeypatch):
    """Runs a test in an event loop, with a group of two that is ready."""

    def start(test):
        async def main():
            cluster, told = Cluster(), []
            monkeypatch.setattr(remote_devices, "ray", cluster)
            for module in (remote_devices, staged_devices):
                monkeypatch.setattr(module, "fetched", cluster.fetched)
            loading = Loading(b"", (), (SimpleNamespace(name="t"),))
            group = StagedDevice(2, 1e9, 0, loading, {}, lambda event, **fields: told.append(event), None)
            cluster.answers = [started(7, 8)]
            assert (await group.look())["t"].inputs == [1]
            await test(group, cluster, told)

        asyncio.run(main())

    return start


def started(*pids):
    return Started(pids, {"t": Samples([1], [2])}, STAGES)


def passed(*values):
    return Passed([(200, str(one)) for one in values], len(values), (0.0, 0.0))


def test_what_one_process_answers_goes_to_the_next_one(in_group):
    async def test(group, cluster, told):
        cluster.answers = [passed(3)]
        assert (await group.run("t", [1])).outputs == [(200, "3")]
        first = Passed([Packed.of(1)], 1)
        assert cluster.asked == [
            ("2-1", "ready", ("1-0", "ready", Started((), {}, ()))),
            ("2-1", "run", ("1-0", "run", first)),
        ]
        assert (group.pids, group.stages, group.models) == ([7, 8], list(STAGES), {"t"})

    in_group(test)


@pytest.mark.parametrize("lost", [False, True])
def test_a_batch_that_has_left_the_first_process_is_told_before_its_answer(in_group, lost):
    async def test(group, cluster, told):
        answer = asyncio.get_running_loop().create_future()
        cluster.answers = [answer]
        heard = []
        task = asyncio.create_task(group.run("t", [1], lambda: heard.append(task.done())))
        await asyncio.sleep(0.01)
        assert cluster.asked[-1] == ("2-1", "run", ("1-0", "run_first", Passed([Packed.of(1)], 1)))
        cluster.left.set_exception(RayActorError()) if lost else cluster.left.set_result(None)
        await asyncio.sleep(0.01)
        answer.set_result(passed(3))
        assert (await task).outputs == [(200, "3")] and heard == ([] if lost else [False])

    in_group(test)


def test_batches_return_in_their_order(in_group):
    async def test(group, cluster, told):
        slow = asyncio.get_running_loop().create_future()
        cluster.answers = [slow, passed(2)]
        ended = []
        for value in (1, 2):
            task = asyncio.create_task(group.run("t", [value]))
            task.add_done_callback(lambda _, value=value: ended.append(value))
        await asyncio.sleep(0.05)
        assert ended == []
        slow.set_result(passed(1))
        while len(ended) < 2:
            await asyncio.sleep(0.001)
        assert ended == [1, 2]

    in_group(test)


@pytest.mark.parametrize("error", [RayActorError(), GetTimeoutError()], ids=["dies", "hangs"])
def test_a_group_is_replaced_once_whatever_was_in_it_and_is_cut_as_before(in_group, error):
    async def test(group, cluster, told):
        gone = asyncio.get_running_loop().create_future()
        cluster.answers = [gone, error]
        one, other = (asyncio.create_task(group.run("t", [value])) for value in (1, 2))
        await asyncio.sleep(0.01)
        assert (cluster.killed, group.pids) == (["1-0", "2-1"], [])
        gone.set_exception(RayActorError())  # Its process was killed just now.
        for task in (one, other):
            with pytest.raises(DeviceLost) as lost:
                await task
        cluster.answers = [started(9, 10)]
        assert await lost.value.back()
        assert (cluster.killed, group.pids) == (["1-0", "2-1"], [9, 10])
        assert cluster.asked[-1] == ("4-1", "ready", ("3-0", "ready", Started((), {}, STAGES)))
        assert told == ["worker_started", "worker_lost", "worker_started"]

    in_group(test)


def test_if_a_batch_fails_each_of_its_inputs_is_tried_alone(in_group):
    async def test(group, cluster, told):
        failed = Passed(None, 2, (), (500, '{"error": "the model failed: no"}'))
        cluster.answers = [failed, passed(4), failed]
        assert (await group.run("t", [2, 3])).outputs == [(200, "4"), failed.failed]
        cluster.answers = [failed]
        with pytest.raises(ServeError, match=r"^the model failed: no$"):
            await group.measure("t", [2, 3])

    in_group(test)


def test_a_batch_whose_inputs_are_tried_alone_still_returns_before_the_next_one(in_group):
    """Seen: requests behind such a batch were run twice, or refused as `gpu_lost`."""

    async def test(group, cluster, told):
        fails, alone = (asyncio.get_running_loop().create_future() for _ in range(2))
        cluster.answers = [fails, passed(9), alone, passed(5)]
        ended = []
        for name, inputs in (("first", [2, 3]), ("next", [4])):
            task = asyncio.create_task(group.run("t", inputs))
            task.add_done_callback(lambda task, name=name: ended.append((name, task.result().outputs)))
        await asyncio.sleep(0.01)
        fails.set_result(Passed(None, 2, (), (500, '{"error": "the model failed: no"}')))
        await asyncio.sleep(0.01)
        assert ended == []
        alone.set_result(passed(4))
        while len(ended) < 2:
            await asyncio.sleep(0.001)
        assert ended == [("first", [(200, "4"), (200, "5")]), ("next", [(200, "9")])]

    in_group(test)


def test_what_a_batch_stands_behind_the_inputs_of_another_is_no_time_of_its_own(in_group):
    """The profile learns seconds less those that a batch has stood. Seen: good requests were refused."""

    async def test(group, cluster, told):
        fails, alone = (asyncio.get_running_loop().create_future() for _ in range(2))
        cluster.answers = [fails, passed(9), alone, passed(5)]
        _, other = (asyncio.create_task(group.run("t", inputs)) for inputs in ([2, 3], [4]))
        await asyncio.sleep(0.01)
        fails.set_result(Passed(None, 2, (), (500, '{"error": "the model failed: no"}')))
        await asyncio.sleep(0.2)
        alone.set_result(passed(4))
        assert (await other).seconds >= 0.2

    in_group(test)


def test_what_a_batch_has_stood_before_stages_is_told(in_group, monkeypatch):
    """The clock stands: the seconds that the stages tell are taken from it."""

    async def test(group, cluster, told):
        monkeypatch.setattr(staged_devices, "time", SimpleNamespace(monotonic=lambda: 0.0))
        first = asyncio.get_running_loop().create_future()
        cluster.answers = [first, Passed([(200, "1")], 1, (-9.0,))]
        one, other = (asyncio.create_task(group.run("t", [1])) for _ in range(2))
        await asyncio.sleep(0.01)
        first.set_result(Passed([(200, "1")], 1, (-2.0, -3.0)))
        assert ((await one).seconds, (await other).seconds) == (0.0, 9.0 - 2.5)

    in_group(test)
