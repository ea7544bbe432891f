"""What `PlacedDevices` does with the decisions about several models, on devices that only pretend to load."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace

import pytest

from fluidtune.serving import placed_devices
from fluidtune.serving.device import Device
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.placed_devices import PlacedDevices
from fluidtune.serving.service_devices import OwnDevices
from fluidtune.serving.setting import PlacedModel, Placing
from symphony_serve.errors import ServeError
from symphony_serve.replacement import Rates
from symphony_serve.shell.device import Waited
from symphony_serve.shell.measuring import measure_profile
from tests.serve.driving import PATIENCE_S, reached
from tests.serving.fake_ray import loading
from tests.serving.stand_ins import FakeProcess

#: Bytes of a model and of a device, seconds of an input, and the rate that keeps one and a half devices busy.
SIZE, MEMORY, SECONDS, MANY = 1.0, 2.5, 0.02, 75.0


class Pretended(FakeProcess):
    async def measure(self, inputs):
        assert self.state == "ready"
        await asyncio.sleep(SECONDS * len(inputs))
        return Waited([(200, "1")] * len(inputs), 0.0)


def broken(name):
    return f"the checkpoint of trial {name} does not load: ValueError"


class Server:
    """Batches of each model are on their way to each device once."""

    devices = frozenset()

    def __init__(self):
        self.held, self.busy = {}, set()

    def hold(self, number, models):
        self.held[number] = models

    def profile(self, model):
        return f"profile of {model}"

    def leave(self, number):
        raise AssertionError("no device goes")

    def busy_with(self, number, model):
        assert model not in self.held[number], "it would get another one"
        before = (number, model) in self.busy
        self.busy.add((number, model))
        return not before


class Service:
    """Two devices, and their placement. broken: the names of models that do not load. most: of models on a device."""

    def __init__(self, memory=MEMORY, size=SIZE, **rates):
        self.server = Server()
        self.devices, self.log, self.offered = {}, [], dict.fromkeys(rates, 0)
        self.broken, self.most = set(), 0
        models = tuple(PlacedModel(name, 4.0, rate, bytes=size) for name, rate in rates.items())
        setting = SimpleNamespace(placing=Placing(models, memory, 30.0), loading=loading(*rates), max_batch=2)
        self.own = OwnDevices(2, {"CPU": 0.0})
        self.placed = PlacedDevices(setting, self.own, self.start, self.tell, lambda: self.offered)

    async def begin(self):
        """Load the models, and serve."""
        first = await self.placed.first()
        self.placed.serve(self.server, lambda: 1)
        return first

    def start(self, number, group):
        def make(given, changed):
            name = given.trials[0].name
            process = Pretended(given, changed, None)
            asyncio.get_running_loop().call_later(0.001, self.load, name, process)
            self.most = max(self.most, len(device.processes) + 1)
            return process

        device = self.devices[number] = Device(make)
        return device

    def load(self, name, process):
        """It has loaded its model, or cannot."""
        if not process.stopped:
            process.fails(broken(name)) if name in self.broken else process.loads()

    def tell(self, event, **fields):
        self.log.append((event, fields))

    def said(self, event):
        return [fields for name, fields in self.log if name == event]

    def stands(self):
        return ["".join(sorted(device.models)) for device in self.devices.values()]

    def where(self, name):
        """A device that has the model, and its process."""
        return next((number, one.processes[name]) for number, one in self.devices.items() if name in one.models)

    async def until_settled(self):
        await reached(lambda: self.placed.placement()["phase"] == "settled")

    async def rates(self, seconds=1e6, **rates):
        """These rates, for long enough."""
        for now in (0.0, seconds):
            self.placed._rate(Rates(now, rates, 10.0))
        await self.until_settled()


@pytest.fixture
async def several(monkeypatch, kept):
    """Makes services, and closes them. One whose front comes again has the same that is kept."""
    monkeypatch.setattr(placed_devices, "LOOK_S", 0.01)
    monkeypatch.setattr(placed_devices, "DOWN_S", 0.05)
    made = []
    yield lambda **given: made.append(Service(**given)) or made[-1]
    for one in made:
        await one.placed.close()
    assert kept == {}


async def test_three_models_are_placed_and_placed_anew_and_no_device_ever_has_more_than_two(several):
    service = several(a=MANY, b=1.0, c=1.0)
    first = await service.begin()
    assert sorted(service.stands()) == ["ab", "ac"]
    assert first.samples == dict.fromkeys("abc", Samples([1], [1]))
    await service.rates(a=1.0, b=1.0, c=MANY)
    assert sorted(service.stands()) == ["ac", "bc"]
    assert service.server.held == {number: device.models for number, device in service.devices.items()}
    assert service.most == 2
    assert [one["what"] for one in service.said("model_moved")][-2:] == ["unloaded", "loaded"]
    (_, last) = service.said("models_placed")
    assert "requests/s changed: a 75 to 1, b 1 to 1, c 1 to 75; placed anew" in last["reason"]


@pytest.mark.parametrize("becomes", ["loading", "silent", "broken"])
async def test_a_process_that_is_lost_has_its_model_back_where_it_stood_if_that_loads_and_the_others_answer(
    several, becomes
):
    """Seen: where the model did not load any more, no next process came up, and nothing said why."""
    service = several(memory=2.0, a=1.0, b=1.0, c=1.0, d=1.0)
    await service.begin()
    before, held, placement = service.stands(), service.server.held, service.placed.placement
    number, process = service.where("b")
    others = service.devices[number].models - {"b"}
    service.log.clear()
    process.state = "silent" if becomes == "silent" else "loading"
    process.changed()
    assert held[number] == others, "the server knows at once"
    await reached(lambda: placement()["phase"] == "moving")
    assert placement()["devices"][str(number)] == [*others]
    process.fails(broken("b")) if becomes == "broken" else process.loads()
    await reached(lambda: placement()["phase"] == "settled")
    moved = [(one["what"], one["reason"]) for one in service.said("model_moved")]
    if becomes == "broken":
        assert (placement()["unavailable"], held[number]) == ({"b": broken("b")}, others)
        assert placement()["why"].endswith(f"; b is not loaded: {broken('b')}") and ("failed", broken("b")) in moved
        await service.rates(a=1.0, b=0.0, c=1.0, d=1.0)
        assert not placement()["unavailable"] and service.stands() == before
        assert service.said("models_placed")[-1]["reason"].startswith("a device lacks b; placed anew")
    else:
        assert held[number] == {*others, "b"} and service.stands() == before
        assert moved == [("loaded", "it is back")] and not service.said("models_placed")


async def test_a_model_that_is_to_stay_after_all_gets_batches_again(several, monkeypatch):
    """Seen: it was held on a device that gave it none."""
    service, leaves = several(a=1.0, b=1.0), [True]
    found = [{0: frozenset("ab"), 1: frozenset("a")}, {0: frozenset("b"), 1: frozenset("a")}, {0: frozenset("ab")}]
    monkeypatch.setattr(placed_devices, "replanned", lambda *given: (found.pop(0), 1.0))
    service.server.busy_with = lambda number, model: any(leaves)
    await service.begin()
    for now in (0.0, 1e6):
        service.placed._rate(Rates(now, {"a": 1.0, "b": MANY}, 10.0))
    await reached(lambda: service.stands()[0] == "b")
    service.devices[1].processes["a"].dies()
    await reached(lambda: len(service.said("models_placed")) == 3)
    leaves.clear()
    await service.until_settled()
    assert service.stands()[0] == "ab" and service.said("model_moved")[-1]["reason"] == "it is back"


@pytest.mark.parametrize(("size", "stands"), [(SIZE, "ac"), (0.5, "abc")])
async def test_a_device_that_is_down_is_replaced_by_the_other_as_far_as_the_models_fit_there(several, size, stands):
    service = several(size=size, a=MANY, b=1.0, c=1.0)
    await service.begin()
    gone = next(number for number, models in enumerate(service.stands()) if "b" in models)
    service.log.clear()
    lost = list(service.devices[gone].processes.values())
    for process in lost:
        process.dies()
    await reached(lambda: service.said("models_placed"))
    await service.until_settled()
    assert service.stands()[1 - gone] == stands
    assert f"device {gone} has no process" in service.said("models_placed")[0]["reason"]
    for process in lost:  # Seen: it was said to be back.
        process.fails(broken(process.key))
    await asyncio.sleep(0.1)
    assert len(service.said("models_placed")) == 1
    for process in lost:
        process.loads()
    await reached(lambda: len(service.said("models_placed")) == 2)
    await service.until_settled()
    assert f"device {gone} is back" in service.said("models_placed")[-1]["reason"]
    assert {model for models in service.stands() for model in models} == set("abc")


@pytest.mark.parametrize(
    ("memory", "size", "said"),
    [
        (MEMORY, None, "model a has .* GiB, and a device .* fits none"),
        (MEMORY, SIZE, "the checkpoint of trial b does not load"),
        (MEMORY, SIZE, "the devices cannot be had: TypeError"),
    ],
)
async def test_what_goes_wrong_while_models_load_ends_the_start(several, memory, size, said):
    """Seven bytes are measured where none were given. Seen: devices that cannot be had went on for ever."""
    service = several(memory=memory, size=size, a=1.0, b=1.0, c=1.0)
    service.broken = {"b"} if "does not load" in said else set()
    if "cannot be had" in said:
        service.load = lambda name, process: setattr(service.own, "poll", None)
    with pytest.raises(ServeError, match=said):
        await asyncio.wait_for(service.placed.first(), PATIENCE_S)
    assert math.isfinite(service.placed.placement()["memory"])


async def test_to_measure_batches_at_the_start_makes_no_later_search_wait(several, monkeypatch):
    """Seen: rates had to differ for as long as it had taken to measure all models."""
    passed = []
    monkeypatch.setattr(placed_devices, "measure_profile", lambda *given: passed.append(1e3) or measure_profile(*given))
    monkeypatch.setattr(placed_devices, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(passed)))
    service = several(a=1.0)
    await service.begin()
    await service.rates(500.0, a=MANY)
    assert passed and len(service.said("models_placed")) == 2


async def test_a_load_that_an_outage_interrupts_is_not_measured_and_the_model_comes_until_then(several):
    """Seen: ten minutes without a process were ten minutes of a load, and `Retry-After` said so."""
    service = several(memory=2.0, **dict.fromkeys("abcde", 1.0))
    await service.begin()
    (name,) = set("abcde") - set().union(*service.stands())
    service.load = lambda name, process: None
    service.placed.asks(name, 1)
    await reached(lambda: any(name in one.processes for one in service.devices.values()))
    assert service.placed.comes(name)
    device = next(one for one in service.devices.values() if name in one.processes)
    service.where(*device.models)[1].dies()
    await reached(lambda: len(service.said("models_placed")) == 2)
    service.log.clear()
    for process in device.processes.values():
        process.loads()
    await reached(lambda: service.said("model_moved"))
    assert [one["reason"] for one in service.said("model_moved")[:2]] == ["it is back"] * 2


async def test_a_model_without_room_comes_when_it_is_asked_and_again_after_a_load_that_failed(several):
    """Five models, and two devices with room for two each."""
    service = several(memory=2.0, **dict.fromkeys("abcde", 1.0))
    first = await service.begin()
    (name,) = set("abcde") - set().union(*service.stands())
    assert set(first.profiles) == {name} and service.placed.comes(name)
    service.broken = {name}
    service.placed.asks(name, 1)
    await reached(lambda: service.placed.unavailable)
    gone = [one["trial"] for one in service.said("model_moved") if "makes room" in one["reason"]][-1]
    assert service.placed.comes(gone) and service.placed.comes_in(gone) > 0
    service.placed.asks(gone, 1)
    await reached(lambda: set().union(*service.stands()) == set("abcde") - {name})
    await service.until_settled()
    service.broken = set()
    await service.rates(**dict.fromkeys("abcde", 0.0))
    assert not service.placed.unavailable
    service.placed.asks(name, 1)
    await reached(lambda: service.placed.placement()["loads"][name])
    assert service.most == 2 and service.placed.comes_in(name) is None


@pytest.mark.parametrize("fail", ["b", "ab"])
async def test_a_front_that_is_restarted_serves_the_models_that_load_if_one_does(several, kept, fail):
    """What it must know of the other one was kept. Seen: the front stayed `failed`."""
    service = several(a=1.0, b=1.0)
    await service.begin()
    await reached(lambda: kept)
    service.placed._end_tasks()
    service = several(a=1.0, b=1.0)
    service.broken = {*fail}
    if fail == "ab":
        with pytest.raises(ServeError, match=r"the checkpoint of trial \w does not load"):
            await service.placed.first()
    else:
        first = await service.placed.first()
        assert set().union(*service.stands()) == {"a"} and first.profiles == {"b": "profile of b"}
        assert first.samples == dict.fromkeys("ab", Samples([1], [1]))
        assert service.placed.unavailable == {"b": broken("b")}
