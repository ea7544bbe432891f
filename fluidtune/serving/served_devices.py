"""The devices of a service, as the front knows them.

`OwnDevices` are the usual ones: a fixed number that the service holds from start to end. `model_leases` has those that
are leases of the arbiter, `placed_devices` those of which each holds some of the models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group

from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.remote_devices import PlacedDevice
from fluidtune.serving.versioned_device import VersionedDevice
from symphony_serve.profiles import Profile
from symphony_serve.shell.async_server import AsyncServer
from symphony_serve.shell.device import Waited


class First(NamedTuple):
    """What there is when the models are loaded: devices by number, one at least, and the samples of each model.

    held: the models of each device; None: each has all. profiles: of models that no device has now, as they were known.
    """

    devices: Mapping[int, VersionedDevice | PlacedDevice]
    samples: dict[str, Samples]
    held: dict[int, frozenset[str]] | None = None
    profiles: Mapping[str, Profile] | None = None


class Measured(NamedTuple):
    """A device whose batches are measured: the same way, but what fails raises."""

    device: VersionedDevice | PlacedDevice

    @property
    def models(self) -> frozenset[str]:
        return self.device.models

    async def run(self, model: str, inputs: list[Any], passed: Callable[[], None] | None = None) -> Waited:
        return await self.device.measure(model, inputs)

    async def check(self) -> None:
        await self.device.check()


class ServedDevices(Protocol):
    """The devices of a service, on the front's event loop."""

    @property
    def count(self) -> int:
        """How many there are to serve with; before `serve`, how many are to come."""

    @property
    def pids(self) -> list[int]:
        """The ids of their processes, as far as these are there."""

    @property
    def waits(self) -> str:
        """What is waited for, other than that models load; "" if nothing is."""

    @property
    def trouble(self) -> str:
        """Why there will never be a device again; "" if nothing is wrong."""

    async def first(self) -> First:
        """Wait until the models are loaded. Raises ServeError if a model cannot be loaded."""

    async def interrupted(self) -> bool:
        """Whether devices of `first` have gone since; then an error says nothing about the models."""

    def anew(self) -> None:
        """Something has failed since `first` was called: it will be called again, and has other processes then."""

    def serve(self, server: AsyncServer, wanted: Callable[[], int]) -> None:
        """The server was made with the devices of `first`. ``wanted``: how many devices its load wants."""

    async def close(self) -> None:
        """The service is over."""


#: What the devices are.
D = TypeVar("D", VersionedDevice, PlacedDevice)


class OwnDevices(Generic[D]):
    """``count`` devices, as `ServedDevices`. start: makes the device of a number in a placement group, or in none.

    resources: Ray's options for a process, of which a device has ``stages``. A device with any is held by a placement
    group from the start of the service to its end, whichever processes are in it. The group bears the actor's name, so
    that a front that was restarted finds it.
    """

    waits = trouble = ""

    def __init__(
        self, count: int, resources: Mapping[str, float], start: Callable[[int, Any], D], stages: int = 1
    ) -> None:
        self.count, self._stages = count, stages
        self._start: Callable[[int, Any], D] = start
        self._bundle = {name[4:-1].upper(): each for name, each in resources.items() if each}
        self._devices: list[D] = []
        self._groups: dict[int, Any] = {}

    @property
    def pids(self) -> list[int]:
        return [pid for device in self._devices for pid in device.pids]

    async def first(self) -> First:
        for number in range(self.count):
            if self._bundle and number not in self._groups:
                self._groups[number] = await asyncio.to_thread(_held, number, [dict(self._bundle)] * self._stages)
            self._devices.append(self._start(number, self._groups.get(number)))
        samples: dict[str, Samples] = {}
        for device in self._devices:
            while (found := await device.look()) is None:
                pass
            samples = found
        return First(dict(enumerate(self._devices)), samples)

    async def interrupted(self) -> bool:
        return False

    def anew(self) -> None:
        for device in self._devices:
            device.stop()
        self._devices = []

    def serve(self, server: AsyncServer, wanted: Callable[[], int]) -> None:
        """Nothing changes."""

    async def close(self) -> None:
        """End the processes, and let the devices go."""
        self.anew()
        for group in self._groups.values():
            await asyncio.to_thread(remove_placement_group, group)


def _held(number: int, bundles: list[dict[str, float]]) -> Any:
    """The placement group that holds this device for this actor, with a bundle for each of its processes."""
    name = f"serving-{ray.get_runtime_context().get_actor_id()}-{number}"
    try:
        return get_placement_group(name)
    except ValueError:
        return placement_group(bundles, name=name)
