"""What the front knows of its devices, and the usual ones: a fixed number that the service holds from start to end.

`model_leases` has the other ones, which are leases of the arbiter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from fluidtune.serving.remote_devices import RemoteDevice
from symphony_serve.shell.threaded_server import ThreadedServer


class First(NamedTuple):
    """What there is when the models are loaded: devices by number, one at least, and inputs of each model."""

    devices: dict[int, RemoteDevice]
    samples: dict[str, list[Any]]


class ServedDevices(Protocol):
    """The devices of a service. Each method is called by the thread that begins, the properties by any thread."""

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

    def first(self, ends: threading.Event) -> First | None:
        """Wait until the models are loaded. None: ``ends`` is set. Raises ServeError if a model cannot be loaded."""

    def interrupted(self) -> bool:
        """Whether devices of `first` have gone since; then an error says nothing about the models."""

    def anew(self) -> None:
        """Something has failed since `first` was called: it will be called again, and has other processes then."""

    def serve(self, server: ThreadedServer, wanted: Callable[[], int]) -> None:
        """The server was made with the devices of `first`. ``wanted``: how many devices its load wants."""

    def check(self, number: int) -> None:
        """Look whether the process of this idle device is there; its thread calls it. Raises DeviceLost if not."""

    def close(self) -> None:
        """The service is over."""


class OwnDevices:
    """``count`` devices. See `ServedDevices` for the methods. start: makes the device of a number."""

    waits = trouble = ""

    def __init__(self, count: int, start: Callable[[int], RemoteDevice]):
        self.count, self._start = count, start
        self._devices: list[RemoteDevice] = []

    @property
    def pids(self) -> list[int]:
        return [device.pid for device in self._devices if device.pid is not None]

    def first(self, ends: threading.Event) -> First | None:
        for number in range(self.count):
            self._devices.append(self._start(number))
        samples: dict[str, list[Any]] = {}
        for device in self._devices:
            while (found := device.look()) is None:
                if ends.is_set():
                    return None
            samples = found
        return First(dict(enumerate(self._devices)), samples)

    def interrupted(self) -> bool:
        return False

    def anew(self) -> None:
        for device in self._devices:
            device.stop()
        self._devices = []

    def serve(self, server: ThreadedServer, wanted: Callable[[], int]) -> None:
        """Nothing changes: Ray ends the processes with this one."""

    def check(self, number: int) -> None:
        self._devices[number].check()

    def close(self) -> None:
        """Nothing is to be done: Ray ends the processes with this one."""
