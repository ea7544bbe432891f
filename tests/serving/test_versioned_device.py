"""The two processes of a device, with stand-ins for them: turns, losses, and which one holds the device."""

from __future__ import annotations

import asyncio

import pytest

from fluidtune.ray_compat.accelerators import VISIBLE_GPUS
from fluidtune.serving import versioned_device
from fluidtune.serving.model_process import Loading, Place, Samples
from fluidtune.serving.versioned_device import VersionedDevice
from fluidtune.serving.winners import Winner
from symphony_serve.errors import DeviceLost, Refused, ServeError
from symphony_serve.shell.device import Waited

FULL = {"num_cpus": 0.0, "num_gpus": 1.0, "scheduling_strategy": "in its group"}


def loading(name):
    return Loading(b"", (), (Winner(name, None, {}, 1.0),))


class Process:
    """Stands for a `RemoteDevice`. loads: whether it has loaded. lost: what its next batch finds."""

    def __init__(self, given, resources):
        self.loading, self.resources, self.pid, self.loads = given, resources, None, True
        self.started, self.stopped, self.lost, self.back = 1, False, False, asyncio.Event()
        self.release = asyncio.Event()
        self.release.set()

    @property
    def models(self):
        return frozenset(trial.name for trial in self.loading.trials)

    @property
    def pids(self):
        return [] if self.pid is None else [self.pid]

    async def look(self, wait_s):
        if not self.loads:
            return None
        self.pid = self.started
        return {name: Samples([1], [2]) for name in self.models}

    async def place(self):
        if self.pid is None:
            raise ServeError("it does not answer")
        return Place("a node", "3", 1, 9, 0, 0)

    async def run(self, model, inputs, passed=None):
        await self.release.wait()
        if self.lost:
            self.pid = None
            raise DeviceLost("killed", self._is_back)
        return Waited([f"{model}{value}" for value in inputs], 0.5)

    measure = run

    async def check(self):
        await self.run("", [])

    async def _is_back(self):
        await self.back.wait()
        self.pid, self.lost = self.started, False
        return True

    def again(self):
        self.started, self.pid = self.started + 1, None

    def stop(self):
        self.stopped = True


@pytest.fixture
def device():
    made = []

    def make(given, resources):
        made.append(Process(given, resources))
        return made[-1]

    async def loaded(beside=True):
        one = VersionedDevice(make, FULL, loading("a"))
        assert await one.look() == {"a": Samples([1], [2])}
        if beside:
            one.load_beside(loading("b@2"))
            assert await one.look_beside() == {"b@2": Samples([1], [2])}
        return one, made

    return loaded


def test_a_process_beside_uses_the_device_without_taking_it(device):
    async def run():
        one, (first, beside) = await device()
        assert (first.resources, beside.resources["num_cpus"]) == (FULL, 0)
        assert "num_gpus" not in beside.resources and beside.resources["scheduling_strategy"] == "in its group"
        assert beside.loading.environment == {VISIBLE_GPUS: "3"}
        assert (one.models, one.pids) == ({"a", "b@2"}, [1, 1])
        one.serve("b@2")
        one.end_beside()
        assert (first.stopped, one.models) == (True, {"b@2"})
        # From now on the device is taken by the process that is left, when it is started again.
        assert (beside.resources, dict(beside.loading.environment)) == (FULL, {})

    asyncio.run(run())


def test_one_batch_runs_at_a_time_whichever_version_has_it(device):
    async def run():
        one, (first, _) = await device()
        first.release.clear()
        running = asyncio.ensure_future(one.run("a", [1]))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(ask("b@2", [2])) for ask in (one.measure, one.run)]
        await asyncio.sleep(0.01)
        assert not any(other.done() for other in others)
        first.release.set()
        assert await running == (["a1"], 0.5)
        for other in others:
            outputs, waited = await other
            assert outputs == ["b@22"] and waited > 0.5  # Its turn was waited for, and that is no time of the batch.

    asyncio.run(run())


def test_a_first_run_takes_no_turn(device):
    async def run():
        one, (first, _) = await device()
        first.release.clear()
        running = asyncio.ensure_future(one.run("a", [1]))
        await asyncio.sleep(0)
        assert await one.first_run("b@2", [1]) >= 0
        first.release.set()
        await running

    asyncio.run(run())


def test_a_process_beside_that_is_lost_refuses_its_batches_and_the_other_one_goes_on(device):
    async def run():
        one, (_, beside) = await device()
        beside.lost = True
        for _ in range(2):
            with pytest.raises(Refused, match="its GPU was lost"):
                await one.run("b@2", [1])
            assert not one.able("b@2") and one.able("a")
            assert await one.run("a", [1]) == (["a1"], 0.5)
        assert not await one.check_beside()
        beside.back.set()
        while not one.able("b@2"):
            await asyncio.sleep(0)
        assert await one.run("b@2", [1]) == (["b@21"], 0.5)

    asyncio.run(run())


def test_a_check_finds_a_lost_process_beside_and_the_device_stays(device):
    async def run():
        one, (first, beside) = await device()
        beside.lost = True
        await one.check()
        assert not one.able("b@2")
        first.lost = True
        with pytest.raises(DeviceLost):
            await one.check()

    asyncio.run(run())


def test_a_device_that_comes_later_has_all_versions_before_it_serves(device):
    async def run():
        made = []

        def make(given, resources):
            made.append(Process(given, resources))
            made[-1].loads = len(made) == 1
            return made[-1]

        one = VersionedDevice(make, FULL, loading("a"), loading("b@2"))
        assert await one.look(0.0) is None
        made[1].loads = True
        assert await one.look(0.0) == {"a": Samples([1], [2])}

    asyncio.run(run())


def test_a_device_that_still_loads_when_another_version_takes_over_loads_that_one(device):
    async def run():
        one = VersionedDevice(Process, FULL, loading("a"), loading("b@2"))
        one.serve("b@2")
        assert (one._main.models, one._main.started) == ({"b@2"}, 2)
        assert await one.look() == {"b@2": Samples([1], [2])}
        assert one.models == {"a", "b@2"}

    asyncio.run(run())


@pytest.mark.parametrize("ends", ["nothing", "the version", "the device"])
def test_a_process_that_is_lost_while_it_is_measured_is_waited_for_unless_it_was_ended(device, ends):
    async def run():
        one, (_, beside) = await device()
        beside.lost = True
        with pytest.raises(DeviceLost, match="killed") as lost:
            await one.measure("b@2", [1])
        with pytest.raises(ServeError, match=r"its process has ended, or hangs, while it was measured \(killed\)"):
            await one.first_run("b@2", [1])
        beside.back.set()
        if ends == "nothing":
            assert await lost.value.back()
            assert (await one.measure("b@2", [1])).outputs == ["b@21"]
            return
        one.end_beside() if ends == "the version" else one.stop()
        with pytest.raises(ServeError, match="its process was ended while it was measured"):
            await lost.value.back()

    asyncio.run(run())


def test_a_process_that_does_not_come_back_is_waited_for_no_longer_than_for_a_load(device, monkeypatch):
    async def run():
        monkeypatch.setattr(versioned_device, "LOAD_S", -1.0)
        one, (first,) = await device(beside=False)
        first.lost = True
        with pytest.raises(DeviceLost) as lost:
            await one.measure("a", [1])
        with pytest.raises(ServeError, match=r"has ended while it was measured \(killed\), and no other"):
            await lost.value.back()

    asyncio.run(run())


def test_a_version_that_ended_is_refused(device):
    async def run():
        one, _ = await device()
        one.end_beside()
        with pytest.raises(Refused):
            await one.run("b@2", [1])
        with pytest.raises(ServeError, match="its process was ended"):
            await one.measure("b@2", [1])

    asyncio.run(run())
