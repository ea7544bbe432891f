"""What `PlacedDevices` does with the decisions about several models, on devices that only pretend to load."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace

import pytest

from fluidtune.serving import placed_devices
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.model_process import Held, Loading
from fluidtune.serving.placed_devices import PlacedDevices
from fluidtune.serving.served_devices import First
from fluidtune.serving.setting import PlacedModel, Placing
from fluidtune.serving.winners import Winner
from symphony_serve.errors import ServeError
from symphony_serve.replacement import Rates
from symphony_serve.shell.device import Waited
from tests.serve.driving import PATIENCE_S

#: Bytes of a model and of a device, seconds of an input, and the rate that keeps one and a half devices busy.
SIZE, MEMORY, SECONDS, MANY = 1.0, 2.5, 0.02, 75.0


class Pretended:
    """A device. `most`: the most models that it had at a time. `broken`: names that it does not load."""

    def __init__(self):
        self.models, self.most, self.broken, self.pid, self.trouble = frozenset(), 0, set(), 1, ""

    async def load(self, trial):
        self.most = max(self.most, len(self.models) + 1)
        await asyncio.sleep(0)
        if trial.name in self.broken:
            raise ServeError(f"the checkpoint of trial {trial.name} does not load: ValueError")
        self.models |= {trial.name}
        return Held(Samples([1], [1]), 7)

    def dies(self):
        self.models, self.pid = frozenset(), None
        self.lost()

    async def unload(self, model):
        self.models -= {model}

    async def measure(self, model, inputs):
        assert model in self.models
        await asyncio.sleep(SECONDS * len(inputs))
        return Waited([(200, "1")] * len(inputs), 0.0)

    async def look(self, wait_s):
        return None if self.pid is None else {}


class Server:
    """Batches of each model are on their way to each device once."""

    closed = False

    def __init__(self):
        self.held, self.busy = {}, set()

    def hold(self, number, models):
        self.held[number] = models

    def profile(self, model):
        return f"profile of {model}"

    def busy_with(self, number, model):
        assert model not in self.held[number], "it would get another one"
        before = (number, model) in self.busy
        self.busy.add((number, model))
        return not before


class Service:
    def __init__(self, monkeypatch, memory=MEMORY, size=SIZE, kept=None, **rates):
        monkeypatch.setattr(placed_devices, "LOOK_S", 0.01)
        self.kept = {} if kept is None else kept
        store = {"kept": self.kept.get, "keep": self.kept.__setitem__, "forget": lambda name: self.kept.pop(name, None)}
        monkeypatch.setattr(placed_devices, "kept_state", SimpleNamespace(own_name=lambda: "x", **store))
        self.devices, self.log, self.offered = {0: Pretended(), 1: Pretended()}, [], dict.fromkeys(rates, 0)
        models = tuple(PlacedModel(name, 4.0, rate, bytes=size) for name, rate in rates.items())
        trials = tuple(Winner(name, None, {}, None) for name in rates)
        setting = SimpleNamespace(placing=Placing(models, memory, 30.0), loading=Loading(b"", (), trials))

        async def first():
            return First(self.devices, {})

        async def close():
            """Nothing was started."""

        own = SimpleNamespace(count=2, pids=[], first=first, close=close, anew=lambda: None)
        self.placed = PlacedDevices(setting, own, self.tell, lambda: self.offered)

    def tell(self, event, **fields):
        self.log.append((event, fields))

    def said(self, event):
        return [fields for name, fields in self.log if name == event]

    def stands(self):
        return ["".join(sorted(device.models)) for device in self.devices.values()]

    async def until_settled(self):
        end = time.monotonic() + PATIENCE_S
        while self.placed.placement()["phase"] != "settled":
            assert time.monotonic() < end
            await asyncio.sleep(0.01)

    async def rates(self, **rates):
        """These rates, for long enough."""
        for now in (0.0, 1e6):
            self.placed._rate(Rates(now, rates, 10.0))
        await self.until_settled()


@pytest.mark.parametrize("at", [4, 5])
def test_a_load_that_goes_on_in_the_next_process_is_none_that_failed(monkeypatch, at):
    """As one that must be in a plain process. at: which of the loads, when each was loaded once."""

    async def run():
        service = Service(monkeypatch, a=MANY, b=1.0, c=1.0)
        load, loads = Pretended.load, []

        async def in_the_next(device, trial):
            loads.append(trial.name)
            if len(loads) == at:
                device.dies()
                await asyncio.sleep(0.05)
                device.pid = 2
            return await load(device, trial)

        monkeypatch.setattr(Pretended, "load", in_the_next)
        first = await service.placed.first()
        assert first.held == {number: device.models for number, device in service.devices.items()}
        assert len(loads) >= at and set("".join(service.stands())) == {"a", "b", "c"}
        await service.placed.close()

    asyncio.run(run())


def test_three_models_are_placed_and_placed_anew_and_no_device_ever_has_more_than_two(monkeypatch):
    async def run():
        service = Service(monkeypatch, a=MANY, b=1.0, c=1.0)
        first = await service.placed.first()
        assert sorted(service.stands()) == ["ab", "ac"]
        assert first.held == {number: device.models for number, device in service.devices.items()}
        assert first.samples == dict.fromkeys("abc", Samples([1], [1]))
        server = Server()
        service.placed.serve(server, lambda: 1)
        await service.rates(a=1.0, b=1.0, c=MANY)
        assert sorted(service.stands()) == ["ac", "bc"]
        assert all(server.held[number] == service.devices[number].models for number in server.held)
        assert [device.most for device in service.devices.values()] == [2, 2]
        assert [one["what"] for one in service.said("model_moved")][-2:] == ["unloaded", "loaded"]
        (_, last) = service.said("models_placed")
        assert "requests/s changed: a 75 to 1, b 1 to 1, c 1 to 75; placed anew" in last["reason"]
        await service.placed.close()

    asyncio.run(run())


def test_a_model_that_does_not_load_leaves_the_models_as_they_stood(monkeypatch):
    async def run():
        service = Service(monkeypatch, a=MANY, b=1.0, c=1.0)
        await service.placed.first()
        before = service.stands()
        for device in service.devices.values():
            device.broken = {"c"}
        await service.rates(a=1.0, b=1.0, c=MANY)
        assert service.stands() == before
        (failed,) = [one for one in service.said("model_moved") if one["what"] == "failed"]
        assert failed["trial"] == "c" and "does not load: ValueError" in failed["reason"]
        await service.placed.close()

    asyncio.run(run())


@pytest.mark.parametrize(("size", "stands", "said"), [(SIZE, "ac", "models_kept"), (0.5, "abc", "models_placed")])
def test_a_device_that_dies_is_replaced_by_the_other_if_all_models_fit_there(monkeypatch, size, stands, said):
    async def run():
        service = Service(monkeypatch, size=size, a=MANY, b=1.0, c=1.0)
        await service.placed.first()
        service.placed.serve(Server(), lambda: 1)
        gone = next(number for number, models in enumerate(service.stands()) if "b" in models)
        service.log.clear()
        service.devices[gone].dies()
        assert service.placed.placement()["devices"][str(gone)] == []
        await service.until_settled()
        assert service.stands()[1 - gone] == stands
        assert f"the process of device {gone} is gone" in service.said(said)[0]["reason"]
        service.devices[gone].pid = 2
        await service.placed._look()
        await service.until_settled()
        assert f"the process of device {gone} is back" in service.said("models_placed")[-1]["reason"]
        assert {model for models in service.stands() for model in models} == set("abc")
        await service.placed.close()

    asyncio.run(run())


def test_a_device_that_is_lost_while_its_models_are_measured_keeps_its_place(monkeypatch):
    """It loads them again itself (`PlacedDevice.measure`). Seen: the model got smaller batches from then on."""

    async def run():
        service = Service(monkeypatch, a=MANY, b=1.0, c=1.0)
        first = await service.placed.first()
        service.devices[0].lost()
        assert service.placed.placement()["phase"] == "settled"
        service.placed.serve(Server(), lambda: 1)
        assert {int(one): set(models) for one, models in service.placed.placement()["devices"].items()} == first.held
        service.devices[0].lost()
        assert service.placed.placement()["phase"] == "searching"
        await service.placed.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("memory", "size", "said"),
    [
        (1.5, SIZE, "the models have .*, and there is no room for . on 2 times"),
        (MEMORY, None, "model a has .* GiB, and a device .* fits none"),
    ],
)
def test_models_that_do_not_fit_are_refused_when_their_bytes_are_measured(monkeypatch, memory, size, said):
    """Seven bytes are measured where none were given."""

    async def run():
        service = Service(monkeypatch, memory, size, a=1.0, b=1.0, c=1.0)
        with pytest.raises(ServeError, match=said):
            await service.placed.first()
        assert math.isfinite(service.placed.placement()["memory"])

    asyncio.run(run())


def test_a_model_that_does_not_load_at_the_start_is_an_error(monkeypatch):
    async def run():
        service = Service(monkeypatch, a=1.0, b=1.0)
        for device in service.devices.values():
            device.broken = {"b"}
        with pytest.raises(ServeError, match="the checkpoint of trial b does not load"):
            await service.placed.first()

    asyncio.run(run())


async def until(holds):
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_a_process_that_comes_back_has_the_models_that_load_and_says_why_the_other_one_does_not(monkeypatch):
    """Two devices with room for two models each. Seen: no next process came up, and nothing said why."""

    async def run():
        service = Service(monkeypatch, memory=2.0, a=1.0, b=1.0, c=1.0, d=1.0)
        await service.placed.first()
        server = Server()
        service.placed.serve(server, lambda: 1)
        (gone,) = [number for number, models in enumerate(service.stands()) if "b" in models]
        (other,) = set(service.stands()[gone]) - {"b"}
        for device in service.devices.values():
            device.broken = {"b"}
        service.devices[gone].dies()
        assert server.held[gone] == frozenset()
        await service.until_settled()
        service.devices[gone].pid = 2
        await until(lambda: service.placed.unavailable)
        await service.until_settled()
        said = "the checkpoint of trial b does not load: ValueError"
        assert service.stands()[gone] == other and server.held[gone] == {other}
        assert service.placed.placement()["unavailable"] == {"b": said}
        assert service.placed.placement()["why"].endswith(f"; b is not loaded: {said}")
        assert said in [one["reason"] for one in service.said("model_moved") if one["what"] == "failed"]
        # It is tried again after a while, and the reason is that no device has it.
        for device in service.devices.values():
            device.broken = set()
        await service.rates(a=1.0, b=0.0, c=1.0, d=1.0)
        assert service.placed.unavailable == {} and "b" in "".join(service.stands())
        assert service.said("models_placed")[-1]["reason"].startswith("no device has b; placed anew")
        await service.placed.close()

    asyncio.run(run())


def test_a_front_that_is_restarted_serves_the_models_that_load(monkeypatch):
    """What it must know of the other one was kept. Seen: the front stayed `failed`."""

    async def run(kept):
        service = Service(monkeypatch, kept=kept, a=1.0, b=1.0)
        await service.placed.first()
        service.placed.serve(Server(), lambda: 1)
        await until(lambda: kept)
        service.placed._end_tasks()
        service = Service(monkeypatch, kept=kept, a=1.0, b=1.0)
        for device in service.devices.values():
            device.broken = {"b"}
        first = await service.placed.first()
        assert set().union(*first.held.values()) == {"a"} and first.profiles == {"b": "profile of b"}
        assert first.samples == dict.fromkeys("ab", Samples([1], [1]))
        assert service.placed.unavailable == {"b": "the checkpoint of trial b does not load: ValueError"}
        await service.placed.close()
        assert kept == {}

    asyncio.run(run({}))


def test_a_front_that_is_restarted_fails_if_no_model_loads(monkeypatch):
    async def run(kept):
        service = Service(monkeypatch, kept=kept, a=1.0)
        await service.placed.first()
        service.placed.serve(Server(), lambda: 1)
        await until(lambda: kept)
        service.placed._end_tasks()
        service = Service(monkeypatch, kept=kept, a=1.0)
        for device in service.devices.values():
            device.broken = {"a"}
        with pytest.raises(ServeError, match="the checkpoint of trial a does not load"):
            await service.placed.first()

    asyncio.run(run({}))
