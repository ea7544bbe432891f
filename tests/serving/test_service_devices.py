"""The devices of a service, without Ray: how they come and go, with a real server, and the processes of each."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
import ray

from fluidtune.serving import device as device_module
from fluidtune.serving import rollouts, service_devices
from fluidtune.serving.device import Device
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.model_leases import Leasing, ModelLeases
from fluidtune.serving.service_devices import Devices, OwnDevices
from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.shell.async_server import AsyncServer
from tests.serve.driving import PATIENCE_S, reached
from tests.serve.stand_ins import quick
from tests.serving.fake_ray import loading
from tests.serving.stand_ins import FakeProcess, device
from tests.themis.fake_tenant import FakeTenant, gpu
from themis_bridge import ThemisError
from themis_bridge.agent import Gained, Leave, Lost

SAMPLES = {"t": Samples([1], [1])}


class Service:
    """Three leases at most, with stand-ins; ``wanted`` is what the load wants. The test steps, and no task.

    loads: of a process that begins to load, see `FakeProcess`. started: the devices, in their order; groups, numbers:
    what each was started with.
    """

    def __init__(self, monkeypatch):
        monkeypatch.setattr(service_devices, "PAUSE_S", 0.001)
        self.now, self.wanted, self.told, self.loads, self.server = 0.0, 1, [], True, None
        self.started, self.processes, self.groups, self.numbers = [], [], [], []
        source = ModelLeases(Leasing("run-served", "anna", "GPU", 3), self.tell, FakeTenant)
        self.leases = Devices(source, self.start, lambda number: {"t": loading("t")}, lambda: self.now)
        self.tenant = source._tenant
        self.leases._task = asyncio.get_running_loop().create_future()

    def start(self, number, group):
        def make(given, changed):
            self.processes.append(FakeProcess(given, changed, self.loads))
            return self.processes[-1]

        self.numbers.append(number)
        self.groups.append(group)
        self.started.append(Device(make))
        return self.started[-1]

    def tell(self, event, **fields):
        self.told.append((event, fields["device"]))

    async def step(self, *notices, later=0.0):
        self.now += later
        self.tenant.notices += notices
        await self.leases.step()

    async def until(self, holds):
        """Step until it is so: a device leaves the server when it has answered."""
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end
            await self.step()
            await asyncio.sleep(0.001)

    def take(self, found):
        """A server is made with the devices of `first`."""
        held = {number: device.models for number, device in found.devices.items()}
        self.server = AsyncServer([quick("t")], found.devices, None, held)
        self.leases.serve(self.server, lambda: self.wanted)

    async def running(self, value):
        """The answer to a request whose batch the first process runs until its `go` is set."""
        self.processes[0].go.clear()
        answer = self.server.ask("t", value)
        await reached(lambda: self.processes[0].entered)
        return answer

    async def close(self):
        for process in self.processes:
            process.go.set()
        if self.server is not None:
            await self.server.close()
        await self.leases.close()


@pytest.fixture
async def service(monkeypatch):
    made = Service(monkeypatch)
    yield made
    await made.close()
    assert made.tenant.closed and all(device.over for device in made.started)


@pytest.fixture
async def served(service):
    """A service that has gained a lease, and serves with it."""
    await service.step(Gained(gpu(0), 1))
    service.take(await service.leases.first())
    return service


async def test_the_first_lease_is_waited_for_and_its_models(service):
    await service.step()
    assert (service.leases.waits, service.leases.count) == ("waiting for a lease of a GPU", 0)
    service.loads = False
    await service.step(Gained(gpu(3), 7))
    assert (service.leases.waits, service.groups) == ("", [("m-3", 7)])
    first = asyncio.ensure_future(service.leases.first())
    service.processes[0].loads()
    assert (await first)[:2] == ({0: service.started[0]}, SAMPLES)
    assert service.leases.count == 0, "it is measured first"
    assert service.told == [("device_gained", 0)]
    assert (service.tenant.app, service.tenant.user) == ("run-served", "anna")


async def test_a_lease_that_comes_while_requests_wait_takes_them(served):
    served.wanted = 2
    behind = [await served.running(value) for value in range(6)]
    await served.step(Gained(gpu(1), 2))
    await served.until(lambda: served.leases.count == 2)
    assert [await one for one in behind[4:]] == ["t4", "t5"]


async def test_a_device_that_leaves_answers_its_batch_before_it_is_given_back(served):
    running = await served.running(1)
    await served.step(Leave(gpu(0), 1, 30.0))
    await served.step(later=20.0)
    assert (served.leases.count, served.tenant.left, served.started[0].over) == (0, [], False)
    served.processes[0].go.set()
    assert await running == "t1"
    await served.until(lambda: served.tenant.left)
    assert served.tenant.left == [("m-0", 1)] and served.started[0].over
    assert served.told == [("device_gained", 0), ("device_returned", 0)]


async def test_a_batch_that_outlasts_its_lease_runs_on_the_next_device(served):
    running = await served.running(1)
    await served.step(Leave(gpu(0), 1, 30.0), Gained(gpu(1), 2))
    await served.step()
    assert served.leases.count == 1
    await served.step(later=31.0)
    assert served.started[0].over and served.tenant.left == [("m-0", 1)]
    served.processes[0].go.set()
    assert await running == "t1"


@pytest.mark.parametrize("ends", [True, False])
async def test_the_last_lease_is_lost_and_another_one_comes_whether_what_ran_there_ends_or_not(served, ends):
    running = await served.running(1)
    await served.step(Lost(gpu(0), 1))
    if ends:
        served.processes[0].go.set()
    assert (served.leases.count, served.leases.waits) == (0, "waiting for a lease of a GPU")
    assert served.tenant.left == [], "the arbiter knows"
    await served.step(Gained(gpu(0), 2))
    await served.until(lambda: served.leases.count == 1)
    assert await served.server.ask("t", 4) == "t4"
    assert ends or (served.numbers[1] == 1 and not running.done())
    served.processes[0].go.set()
    assert await running == "t1"
    assert served.told == [("device_gained", 0), ("device_lost", 0), ("device_gained", served.numbers[1])]


async def test_a_lease_that_came_and_went_at_once_leaves_nothing(served):
    await served.step(Gained(gpu(1), 2), Lost(gpu(1), 2), Lost(gpu(1), 1), Leave(gpu(1), 2, 30.0))
    assert served.started[1].over and served.leases.count == 1


async def test_a_lease_that_is_recalled_while_its_models_load_is_given_back_at_once(served):
    served.wanted = 2
    await served.step(Gained(gpu(1), 2), Leave(gpu(1), 2, 30.0))
    assert served.tenant.left == [("m-1", 2)] and served.started[1].over


async def test_devices_that_the_load_does_not_want_go_by_their_numbers_except_the_last(served):
    served.wanted = 5
    assert served.leases.wanted == 3, "the user allows no more"
    await served.step(Gained(gpu(1), 2), Gained(gpu(2), 3))
    await served.until(lambda: served.leases.count == 3)
    served.wanted = 1
    await served.step()
    await served.step(later=service_devices.SPARE_S / 2)
    served.wanted = 3
    await served.step(later=service_devices.SPARE_S)
    served.wanted = 0
    await served.step()
    assert served.leases.count == 3, "it wanted three in between"
    await served.step(later=service_devices.SPARE_S)
    assert served.leases.count == 1
    await served.until(lambda: len(served.tenant.left) == 2)
    assert sorted(served.tenant.left) == [("m-1", 2), ("m-2", 3)]
    assert await served.server.ask("t", 4) == "t4"
    served.wanted = 2
    await served.step(Gained(gpu(2), 4))
    await served.until(lambda: served.leases.count == 2)
    assert served.numbers[-1] == 1, "the smallest number that is free"


async def test_models_that_do_not_load_are_told_and_tried_again(service):
    service.loads = "no such file"
    await service.step(Gained(gpu(0), 1))
    with pytest.raises(ServeError, match="no such file"):
        await service.leases.first()
    assert not await service.leases.interrupted(), "it is the models' fault"
    service.loads = True
    service.leases.anew()
    assert (await service.leases.first()).samples == SAMPLES
    assert [one.stopped for one in service.processes] == [True, False]


async def test_a_lease_that_goes_while_it_is_measured_interrupts_only(service):
    await service.step(Gained(gpu(0), 1))
    await service.leases.first()
    assert not await service.leases.interrupted()
    await service.step(Leave(gpu(0), 1, 30.0))
    assert await service.leases.interrupted()
    await service.step(Gained(gpu(1), 2))
    assert list((await service.leases.first()).devices.values()) == [service.started[1]]
    assert not await service.leases.interrupted()


async def test_a_lease_that_goes_when_it_was_just_measured_answers_nothing(service):
    await service.step(Gained(gpu(0), 1))
    found = await service.leases.first()
    await service.step(Lost(gpu(0), 1), Gained(gpu(1), 2))
    service.take(found)
    assert service.leases.count == 0
    await service.until(lambda: service.leases.count == 1)
    assert await service.server.ask("t", 3) == "t3"


async def test_a_service_that_the_arbiter_refuses_for_good_says_why(served):
    def refuse():
        raise ThemisError("another app of that name")

    served.tenant.poll = refuse
    await served.leases._run()
    assert (served.leases.count, served.leases.trouble) == (0, "another app of that name")
    assert served.started[0].over
    with pytest.raises(ServeError, match="another app"):
        await served.leases.first()


def test_a_service_that_the_arbiter_never_lets_in_says_why():
    def refuse(*given):
        raise ThemisError("the arbiter leases single CPUs")

    with pytest.raises(ServeError, match="leases single CPUs"):
        ModelLeases(Leasing("a", "", "GPU", None), lambda event, **fields: None, refuse)


async def test_own_devices_come_at_once_and_all_of_them_are_waited_for(monkeypatch):
    """Seen: an error with the second one lost the first one, and nothing but the log said so."""
    failing = [RuntimeError("the GCS is away")]

    def held(name):
        if name.endswith("-1") and failing:
            raise failing[0]

    context = SimpleNamespace(get_actor_id=lambda: "front")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(service_devices, "get_placement_group", held)
    made = []
    devices = Devices(
        OwnDevices(2, {"CPU": 1.0}),
        lambda *given: made.append(device(False)) or made[-1],
        lambda number: {"t": loading("t")},
    )
    with pytest.raises(ServeError, match="the GCS is away"):
        await asyncio.wait_for(devices.first(), PATIENCE_S)
    failing.clear()
    while len(made) < 2:
        await asyncio.sleep(0.01)
    made[0].processes["t"].loads()
    await asyncio.sleep(2 * service_devices.LOOK_S)
    first = asyncio.ensure_future(devices.first())
    assert (await asyncio.wait({first}, timeout=0.3))[1] == {first}
    made[1].processes["t"].loads()
    assert list((await first).devices.values()) == made
    await devices.close()
    assert all(one.over for one in made)


@pytest.mark.parametrize("models", ["t", "tu"])
@pytest.mark.parametrize("source", ["own", "leased"])
async def test_what_a_process_that_dies_had_is_answered_by_the_next_one_and_its_neighbours_meanwhile(source, models):
    own = OwnDevices(1, {"CPU": 0.0})
    leases = ModelLeases(Leasing("a", "", "GPU", None), lambda event, **fields: None, FakeTenant)
    leases._tenant.notices = [Gained(gpu(0), 1)]
    desired = {name: loading(name) for name in models}
    devices = Devices(own if source == "own" else leases, lambda *given: device(), lambda number: desired)
    (one,) = (await devices.first()).devices.values()
    async with AsyncServer([*map(quick, models)], {0: one}, None, {0: one.models}) as server:
        devices.serve(server, lambda: 1)
        one.processes["t"].mortal = True
        waits = server.ask("t", 1)
        while one.processes["t"].state == "ready":
            await asyncio.sleep(0.001)
        assert not server.able_for("t")
        if "u" in models:
            assert await server.ask("u", 2) == "u2"
        one.processes["t"].mortal = False
        one.processes["t"].loads()
        assert await waits == "t1"
    await devices.close()


# One device and its processes: whose turn it is, and what is left when one is lost.

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
