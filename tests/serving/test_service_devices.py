"""Devices that come and go, without Ray: stand-ins of the tenant and of model processes, and a real server."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from benchmarks.served_by_thread import ServedByThread
from fluidtune.serving import service_devices
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.model_leases import Leasing, ModelLeases
from fluidtune.serving.service_devices import Devices, OwnDevices
from symphony_serve.delays import Delays
from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.model_side import EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.shell.async_server import AsyncServer
from symphony_serve.shell.device import LocalDevice
from tests.serve.driving import PATIENCE_S, never_back, until
from tests.serving import stand_ins
from tests.serving.fake_ray import loading
from tests.themis.fake_tenant import FakeTenant, gpu
from themis_bridge import ThemisError
from themis_bridge.agent import Gained, Leave, Lost

#: Seconds of the SLO.
SLO_S = 60.0


DELAYS = Delays(jitter=SLO_S / 2)
SAMPLES = {"t": Samples([1], [2])}


class Device(LocalDevice):
    """Stands for a `Device` with one model, which doubles numbers. loads: False: it loads still; or why it cannot.

    A batch waits until `go` is set. group: of its lease. starts: how many processes it has had.
    """

    lost, over, samples = False, False, SAMPLES

    def __init__(self, number, group, loads):
        super().__init__({"t": self._double})
        self.number, self.group, self.loads = number, group, loads
        self.pids, self.starts, self.stopped, self.changed = [number], 0, False, lambda: None
        self.go, self.entered, self.killed = threading.Event(), threading.Event(), False
        self.go.set()

    @property
    def loaded(self):
        return self.loads is True

    @property
    def trouble(self):
        return self.loads if isinstance(self.loads, str) else ""

    def want(self, loadings):
        self.starts += not loadings

    def _double(self, values):
        self.entered.set()
        assert self.go.wait(PATIENCE_S)
        if self.killed:
            raise DeviceLost("killed", never_back)
        return [2 * value for value in values]

    def kill(self):
        """The lease is over, and Ray ends the process with the batch that it runs."""
        self.killed = True
        self.go.set()

    def stop(self):
        self.stopped = True
        self.kill()


class Service:
    """Leases with stand-ins; ``wanted`` is what the load wants. Its thread is the test's, which calls `step`.

    loads: of a device that begins to load, see `Device`.
    """

    def __init__(self, monkeypatch, most=None):
        monkeypatch.setattr(service_devices, "LOOK_S", 0.001)
        monkeypatch.setattr(service_devices, "PAUSE_S", 0.001)
        self.now, self.wanted, self.started, self.told, self.loads = 0.0, 1, [], [], True
        source = ModelLeases(Leasing("run-served", "anna", "GPU", most), self.tell, FakeTenant)
        self.leases = Devices(source, self.start, lambda number: {"t": "loading"}, lambda: self.now)
        self.tenant = source._tenant
        model = Model("t", Profile.linear(0.0, 1e-3, 4), SLO_S, policy=EAGER, delays=DELAYS)
        self.server = ServedByThread([model], [LocalDevice({"t": list})])
        self.server.leave(0)
        until(lambda: not self.server.look("devices"))
        self.thread = self.server.thread
        #: The test steps, and no task.
        self.leases._task = self.thread.call(lambda: asyncio.create_task(asyncio.sleep(0)))

    def start(self, number, group):
        self.started.append(Device(number, group, self.loads))
        return self.started[-1]

    def tell(self, event, **fields):
        self.told.append((event, fields["device"]))

    def step(self, *notices, later=0.0):
        self.now += later
        self.tenant.notices += notices
        self.thread.run(self.leases.step())

    def first(self):
        return self.thread.run(self.leases.first())

    def until(self, reached):
        """Step until it is so: a device's thread leaves the server when it has answered."""
        until(lambda: self.step() or reached())

    def serve(self):
        """Gain a lease and begin to serve with it."""
        self.step(Gained(gpu(0), 1))
        self.step()
        self.take(self.first())
        return self

    def take(self, found):
        """The server has the devices of `first`."""
        for number, device in found.devices.items():
            self.server.join(number, device)
        self.thread.call(lambda: self.leases.serve(self.server.server, lambda: self.wanted))

    def ask(self, value):
        return self.server.submit("t", value)

    def close(self):
        self.server.close()
        self.thread.run(self.leases.close())
        self.thread.end()


@pytest.fixture
def service(monkeypatch):
    made = Service(monkeypatch)
    yield made
    for device in made.started:
        device.go.set()
    made.close()
    assert made.tenant.closed and all(device.stopped for device in made.started)


@pytest.fixture
def served(service):
    return service.serve()


def test_the_first_lease_is_waited_for_and_its_models(service):
    service.step()
    assert (service.leases.waits, service.leases.count) == ("waiting for a lease of a GPU", 0)
    service.loads = False
    service.step(Gained(gpu(3), 7))
    assert service.leases.waits == "" and service.started[0].group == ("m-3", 7)
    loads = asyncio.run_coroutine_threadsafe(service.leases.first(), service.thread.loop)
    service.started[0].loads = True
    service.step()
    assert loads.result(PATIENCE_S)[:2] == ({0: service.started[0]}, SAMPLES)
    assert service.leases.count == 0, "it is measured first"
    assert service.told == [("device_gained", 0)]
    assert (service.tenant.app, service.tenant.user) == ("run-served", "anna")


def test_no_more_devices_are_wanted_than_the_user_allows(monkeypatch):
    service = Service(monkeypatch, most=2)
    service.serve().wanted = 5
    assert service.leases.wanted == 2
    service.close()


def test_a_lease_that_comes_while_requests_wait_takes_them(served):
    served.wanted = 2
    served.started[0].go.clear()
    behind = [served.ask(value) for value in range(6)]
    assert served.started[0].entered.wait(PATIENCE_S)
    served.step(Gained(gpu(1), 2))
    served.until(lambda: served.leases.count == 2)
    assert [one.result(PATIENCE_S) for one in behind[4:]] == [8, 10]


def test_a_device_that_leaves_answers_its_batch_before_it_is_given_back(served):
    served.started[0].go.clear()
    running = served.ask(1)
    assert served.started[0].entered.wait(PATIENCE_S)
    served.step(Leave(gpu(0), 1, 30.0))
    served.step(later=20.0)
    assert (served.leases.count, served.tenant.left) == (0, [])
    assert not served.started[0].stopped
    served.started[0].go.set()
    assert running.result(PATIENCE_S) == 2
    served.until(lambda: served.tenant.left)
    assert served.tenant.left == [("m-0", 1)] and served.started[0].stopped
    assert served.told == [("device_gained", 0), ("device_returned", 0)]


def test_a_batch_that_outlasts_its_lease_runs_on_the_next_device(served):
    served.started[0].go.clear()
    running = served.ask(1)
    assert served.started[0].entered.wait(PATIENCE_S)
    served.step(Leave(gpu(0), 1, 30.0), Gained(gpu(1), 2))
    served.step()
    assert served.leases.count == 1
    served.step(later=31.0)
    assert served.started[0].stopped and served.tenant.left == [("m-0", 1)]
    assert running.result(PATIENCE_S) == 2


def test_the_last_lease_is_lost_and_another_one_comes(served):
    served.started[0].go.clear()
    running = served.ask(1)
    assert served.started[0].entered.wait(PATIENCE_S)
    served.started[0].kill()
    served.step(Lost(gpu(0), 1))
    assert (served.leases.count, served.leases.waits) == (0, "waiting for a lease of a GPU")
    assert served.tenant.left == [], "the arbiter knows"
    served.step(Gained(gpu(0), 2))
    served.until(lambda: served.leases.count == 1)
    assert running.result(PATIENCE_S) == 2
    assert served.told == [("device_gained", 0), ("device_lost", 0), ("device_gained", served.started[1].number)]


def test_a_device_whose_end_takes_long_keeps_nobody_waiting(served):
    served.started[0].go.clear()
    running = served.ask(1)
    assert served.started[0].entered.wait(PATIENCE_S)
    served.started[0].kill = lambda: None
    served.step(Lost(gpu(0), 1), Gained(gpu(0), 2))
    served.until(lambda: served.leases.count == 1)
    assert served.ask(4).result(PATIENCE_S) == 8
    assert served.started[1].number == 1 and not running.done()


def test_a_lease_that_came_and_went_at_once_leaves_nothing(served):
    served.step(Gained(gpu(1), 2), Lost(gpu(1), 2), Lost(gpu(1), 1), Leave(gpu(1), 2, 30.0))
    assert served.started[1].stopped and served.leases.count == 1


def test_a_lease_that_is_recalled_while_its_models_load_is_given_back_at_once(served):
    served.wanted = 2
    served.step(Gained(gpu(1), 2), Leave(gpu(1), 2, 30.0))
    assert served.tenant.left == [("m-1", 2)] and served.started[1].stopped


def test_devices_that_the_load_does_not_want_go_by_their_numbers_except_the_last(served):
    served.wanted = 3
    served.step(Gained(gpu(1), 2), Gained(gpu(2), 3))
    served.until(lambda: served.leases.count == 3)
    served.wanted = 1
    served.step()
    served.step(later=service_devices.SPARE_S / 2)
    served.wanted = 3
    served.step(later=service_devices.SPARE_S)
    served.wanted = 0
    served.step()
    assert served.leases.count == 3, "it wanted three in between"
    served.step(later=service_devices.SPARE_S)
    assert served.leases.count == 1
    served.until(lambda: len(served.tenant.left) == 2)
    assert sorted(served.tenant.left) == [("m-1", 2), ("m-2", 3)]
    assert served.ask(4).result(PATIENCE_S) == 8
    served.wanted = 2
    served.step(Gained(gpu(2), 4))
    served.until(lambda: served.leases.count == 2)
    assert served.started[-1].number == 1, "the smallest number that is free"


def test_models_that_do_not_load_are_told_and_tried_again(service):
    service.loads = "no such file"
    service.step(Gained(gpu(0), 1))
    with pytest.raises(ServeError, match="no such file"):
        service.first()
    assert not service.thread.run(service.leases.interrupted()), "it is the models' fault"
    service.started[0].loads = True
    service.thread.call(service.leases.anew)
    service.step()
    assert service.first().samples == SAMPLES
    assert service.started[0].starts == 1


def test_a_lease_that_goes_while_it_is_measured_interrupts_only(service):
    service.step(Gained(gpu(0), 1))
    service.step()
    service.first()
    assert not service.thread.run(service.leases.interrupted())
    service.step(Leave(gpu(0), 1, 30.0))
    assert service.thread.run(service.leases.interrupted())
    service.step(Gained(gpu(1), 2))
    service.step()
    assert list(service.first().devices.values()) == [service.started[1]]
    assert not service.thread.run(service.leases.interrupted())


def test_a_lease_that_goes_when_it_was_just_measured_answers_nothing(service):
    service.step(Gained(gpu(0), 1))
    service.step()
    found = service.first()
    service.step(Lost(gpu(0), 1), Gained(gpu(1), 2))
    service.take(found)
    assert service.leases.count == 0
    service.until(lambda: service.leases.count == 1)
    assert service.ask(3).result(PATIENCE_S) == 6


def test_a_service_that_the_arbiter_refuses_for_good_says_why(served):
    def refuse():
        raise ThemisError("another app of that name")

    served.tenant.poll = refuse
    served.thread.run(served.leases._run())
    assert (served.leases.count, served.leases.trouble) == (0, "another app of that name")
    assert served.started[0].stopped
    with pytest.raises(ServeError, match="another app"):
        served.first()


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
    monkeypatch.setattr(service_devices, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(service_devices, "get_placement_group", held)
    made = []
    devices = Devices(
        OwnDevices(2, {"num_cpus": 1.0}),
        lambda *given: made.append(Device(*given, False)) or made[-1],
        lambda number: {"t": "loading"},
    )
    with pytest.raises(ServeError, match="the GCS is away"):
        await asyncio.wait_for(devices.first(), PATIENCE_S)
    failing.clear()
    while len(made) < 2:
        await asyncio.sleep(0.01)
    made[0].loads = True
    await asyncio.sleep(2 * service_devices.LOOK_S)
    first = asyncio.ensure_future(devices.first())
    assert (await asyncio.wait({first}, timeout=0.3))[1] == {first}
    made[1].loads = True
    assert list((await first).devices.values()) == made
    await devices.close()
    assert all(one.stopped for one in made)


@pytest.mark.parametrize("models", ["t", "tu"])
@pytest.mark.parametrize("source", ["own", "leased"])
async def test_what_a_process_that_dies_had_is_answered_by_the_next_one_and_its_neighbours_meanwhile(source, models):
    own = OwnDevices(1, {"num_cpus": 0.0})
    leases = ModelLeases(Leasing("a", "", "GPU", None), lambda event, **fields: None, FakeTenant)
    leases._tenant.notices = [Gained(gpu(0), 1)]
    desired = {name: loading(name) for name in models}
    devices = Devices(own if source == "own" else leases, lambda *given: stand_ins.device(), lambda number: desired)
    (one,) = (await devices.first()).devices.values()
    served = [Model(name, Profile.linear(0.0, 1e-3, 4), SLO_S, policy=EAGER, delays=DELAYS) for name in models]
    async with AsyncServer(served, {0: one}, None, {0: one.models}) as server:
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
