"""The two processes of a device, with stand-ins for them: turns, losses, and which one holds the device."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from fluidtune.ray_compat.accelerators import VISIBLE_GPUS
from fluidtune.serving import versioned_device
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.model_process import Loading, Place
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


@pytest.mark.serve
def test_a_batch_that_never_ends_while_a_version_is_measured_holds_nobody_up(device):
    """Seen: a version whose batch of 2 never ends stopped the one that serves for a minute, twice."""
    from fluidtune.serving.rollouts import _in_turns

    async def run():
        one, (_, beside) = await device()
        measured = _in_turns(one, "b@2", 60.0)
        assert await measured([1]) == (["b@21"], 0.5)
        beside.release.clear()
        hangs = asyncio.ensure_future(measured([1, 2]))
        await asyncio.sleep(0)
        assert await asyncio.wait_for(one.run("a", [1]), 5.0) == (["a1"], 0.5)
        with_turn = asyncio.ensure_future(measured([1]))
        await asyncio.sleep(0)
        assert one._turn.locked() and not hangs.done()
        beside.release.set()
        assert (await hangs).outputs == ["b@21", "b@22"] and (await with_turn).outputs == ["b@21"]

    asyncio.run(run())


@pytest.mark.serve
def test_a_batch_that_is_slower_than_the_slo_while_a_version_is_measured_holds_nobody_up(device, monkeypatch):
    from fluidtune.serving import rollouts

    now = [0.0]
    for module in (rollouts, versioned_device):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def run():
        one, (_, beside) = await device()
        measured = rollouts._in_turns(one, "b@2", 1.0)

        async def takes_a_turn(seconds):
            """Whether a batch of 2 does, which takes these seconds beside the half one that its process waits."""
            beside.release.clear()
            running = asyncio.ensure_future(measured([1, 2]))
            await asyncio.sleep(0)
            turn, now[0] = one._turn.locked(), now[0] + seconds + 0.5
            beside.release.set()
            await running
            return turn

        for _ in range(3):
            assert not await takes_a_turn(1.1)
        # What is set up at a first run is no time of the batch.
        assert not await takes_a_turn(0.9) and await takes_a_turn(0.9)
        # Nor is the wait for a turn.
        async with one._turn:
            waits = asyncio.ensure_future(measured([1, 2]))
            await asyncio.sleep(0)
            now[0] += 9.0
        await waits
        assert await takes_a_turn(0.9)
        beside.lost = True
        with pytest.raises(DeviceLost):
            await measured([1, 2])
        beside.lost = False
        assert not await takes_a_turn(0.9)

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


class OneThreaded:
    """Has a `Process` answer a check after the batch that it runs, as an actor does: too late."""

    def __init__(self, process):
        self._process, self.asked = process, 0
        process.check = self.check

    async def check(self):
        self.asked += 1
        if not self._process.release.is_set():
            raise DeviceLost("it is idle and does not answer", self._process._is_back)


@pytest.mark.parametrize("moved", [False, True])
def test_a_process_beside_that_runs_a_batch_is_asked_after_it(device, moved):
    """moved: its batch began when it was the one that serves."""

    async def run():
        one, both = await device()
        asked = OneThreaded(both[0 if moved else 1])
        asked._process.release.clear()
        running = asyncio.ensure_future(one.run("a" if moved else "b@2", [1]))
        await asyncio.sleep(0)
        if moved:
            one.serve("b@2")
        checks = asyncio.ensure_future(one.check_beside())
        await asyncio.sleep(0.01)
        assert not checks.done() and asked.asked == 0
        asked._process.release.set()
        assert await checks and asked.asked == 1
        await running

    asyncio.run(run())


def test_a_process_beside_is_asked_while_the_other_one_hangs(device):
    """An operator rolls back just then."""

    async def run():
        one, (first, _) = await device()
        first.release.clear()
        hangs = asyncio.ensure_future(one.run("a", [1]))
        await asyncio.sleep(0)
        assert await asyncio.wait_for(one.check_beside(), 5.0)
        first.release.set()
        await hangs

    asyncio.run(run())


@pytest.mark.parametrize("how", ["first_run", "measure"])
def test_a_process_beside_that_is_measured_is_not_asked_when_the_device_is_idle(device, how):
    async def run():
        one, (_, beside) = await device()
        asked = OneThreaded(beside)
        beside.release.clear()
        running = asyncio.ensure_future(getattr(one, how)("b@2", [1]))
        await asyncio.sleep(0)
        await one.check()
        beside.release.set()
        await running
        assert asked.asked == 0 and await one.check_beside()

    asyncio.run(run())


def test_a_process_beside_that_is_lost_is_asked_again_when_it_is_back(device):
    async def run():
        one, (_, beside) = await device()
        beside.lost = True
        await one.check()
        assert not await one.check_beside() and not await one.check_beside(0.01)
        checks = asyncio.ensure_future(one.check_beside(10.0))
        await asyncio.sleep(0)
        beside.back.set()
        assert await checks

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
