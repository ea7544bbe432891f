"""The devices of a service: each has the models that it is to have, whatever came, went or died.

What is to be is computed from versions or a placement (`desired`); what is, are processes. `Devices` starts and ends
processes until the two are the same, and tells the server which device can run what. Devices come and go as their
source says: `OwnDevices` here, `model_leases`. All times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group

from fluidtune.cluster.devices.holding import SPARE_S
from fluidtune.serving.device import Device
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.model_process import Loading
from fluidtune.serving.process import LOOK_S, PAUSE_S
from symphony_serve.errors import ServeError
from symphony_serve.profiles import Profile
from symphony_serve.shell.async_server import AsyncServer

logger = logging.getLogger(__name__)


class Came(NamedTuple):
    """A device has come, which this placement group holds; None: nothing does."""

    device: Hashable
    group: Any
    node: str = ""


class Leaves(NamedTuple):
    """A device goes within so many seconds."""

    device: Hashable
    within: float


class Gone(NamedTuple):
    """A device is gone."""

    device: Hashable


Notice = Came | Leaves | Gone


class SourceLost(Exception):
    """There will never be a device again."""


class Source(Protocol):
    """Where devices come from. least: as many are loaded before the service is measured."""

    least: int

    @property
    def waits(self) -> str:
        """What is waited for while there is no device."""

    async def poll(self) -> Sequence[Notice]:
        """What has happened since the last call. Raises SourceLost."""

    def wanted(self, load: int) -> int:
        """How many of the devices that ``load`` wants the service may have; 1 at least."""

    def vacated(self, device: Hashable) -> None:
        """Nothing of the service is on the device any more."""

    def tell(self, event: str, **fields: Any) -> None:
        """A device has come or gone."""

    async def close(self) -> None:
        """The service is over."""


class First(NamedTuple):
    """What there is when the models are loaded: devices by number, one at least, and the samples of each model.

    profiles: of models that no device has now, as they were known.
    """

    devices: Mapping[int, Device]
    samples: Mapping[str, Samples]
    profiles: Mapping[str, Profile] | None = None


@dataclass(eq=False)
class _Member:
    """A device of the source. It loads, then it joins the server, then it leaves.

    until: when it is given back at the latest; None: it stays.
    """

    name: Hashable
    number: int
    device: Device
    joined: bool = False
    until: float | None = None


class Devices:
    """See the module. start: makes the device of a number in a placement group, without a model.

    One thing: what is to be, what is, and what is said of it are the same devices.

    desired: by key, the models that the device of this number is to have. clock: another one in tests.
    """

    def __init__(
        self,
        source: Source,
        start: Callable[[int, Any], Device],
        desired: Callable[[int], Mapping[str, Loading]],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._source, self._start, self._desired, self._clock = source, start, desired, clock
        self._held: dict[Hashable, _Member] = {}
        #: What `first` has returned.
        self._first: list[_Member] = []
        self._server: AsyncServer | None = None
        self._load_wants: Callable[[], int] = lambda: 1
        #: Since when there are more devices than the load wants; None: there are not.
        self._spare_since: float | None = None
        #: Why there will never be a device again; "": nothing is wrong.
        self.trouble = ""
        #: Why the latest step has failed; None: it has not.
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def wanted(self) -> int:
        """How many devices the load wants, of those that the service may have."""
        return self._source.wanted(self._load_wants())

    @property
    def count(self) -> int:
        """How many there are to serve with."""
        return sum(one.joined and one.until is None for one in self._held.values())

    @property
    def processes(self) -> tuple[list[int], int]:
        """The ids of those that have loaded, and how many there are, those that load among them."""
        devices = [one.device for one in list(self._held.values())]
        return [pid for one in devices for pid in one.pids], sum(len(one.processes) for one in devices)

    @property
    def waits(self) -> str:
        """What is waited for, other than that models load; "" if nothing is."""
        return "" if self._held else self._source.waits

    @property
    def present(self) -> dict[int, Device]:
        """The devices that stay, by number."""
        return {one.number: one.device for one in self._held.values() if one.until is None}

    # What the service calls.

    async def first(self) -> First:
        """Wait until as many devices as the source says have their models.

        Raises ServeError if one cannot, or if the source fails before that.
        """
        self._first = []
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="serve-devices")
        loading = asyncio.create_task(self._load_first(), name="serve-first")
        try:
            while not (await asyncio.wait({loading}, timeout=LOOK_S))[0]:
                if self.trouble:
                    raise ServeError(self.trouble)
                if self._error is not None:
                    raise ServeError(f"the devices cannot be had: {self._error!r}") from self._error
            return loading.result()
        finally:
            loading.cancel()

    async def _load_first(self) -> First:
        """As `first`, whatever the source says meanwhile."""
        while True:
            staying = [one for one in self._held.values() if one.until is None]
            for one in staying:
                if one.device.trouble:
                    raise ServeError(one.device.trouble)
            loaded = [one for one in staying if one.device.loaded][: self._source.least]
            if len(loaded) == self._source.least:
                self._first = loaded
                return First({one.number: one.device for one in loaded}, loaded[0].device.samples)
            await asyncio.sleep(LOOK_S)

    async def interrupted(self) -> bool:
        """Whether devices of `first` have gone since; then an error says nothing about the models."""
        await asyncio.sleep(PAUSE_S)  # The arbiter's word may come a little later than the end of a process.
        return not all(self._stays(one) for one in self._first)

    def anew(self) -> None:
        """Something has failed since `first` was called: it will be called again, and has other processes then."""
        for one in self._held.values():
            if not one.joined and one.until is None:
                one.device.want({})
        self.reconcile()

    def serve(self, server: AsyncServer, wanted: Callable[[], int]) -> None:
        """The server was made with the devices of `first`. ``wanted``: how many devices its load wants."""
        self._server, self._load_wants = server, wanted
        for one in self._first:
            if self._stays(one):
                self._join(one)
            else:
                server.leave(one.number)

    async def close(self) -> None:
        """The service is over: end all processes, and let the devices go."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for one in self._held.values():
            one.device.stop()
        self._held.clear()
        await self._source.close()

    def reconcile(self) -> None:
        """Have each device start and end the processes that make the difference to what is desired."""
        for one in self._held.values():
            if one.until is None:
                one.device.want(self._desired(one.number))

    # The task.

    async def _run(self) -> None:
        while True:
            try:
                await self.step()
                self._error = None
            except SourceLost as lost:
                logger.warning("The service has no devices any more: %s", lost)
                for one in list(self._held.values()):
                    self._lose(one, str(lost))
                self.trouble = str(lost)
                return
            except Exception as error:
                logger.exception("A look at the devices has failed")
                self._error = error
            await asyncio.sleep(LOOK_S)

    async def step(self) -> None:
        """Take in what the source has said and what has become of the processes. One task calls it."""
        notices, now = await self._source.poll(), self._clock()
        for notice in notices:
            self._take(notice, now)
        self.reconcile()
        for one in list(self._held.values()):
            self._move_on(one, now)
        self._give_back(now)

    def _take(self, notice: Notice, now: float) -> None:
        if isinstance(notice, Came):
            number = self._free_number()
            self._held[notice.device] = _Member(notice.device, number, self._start(number, notice.group))
            self._source.tell("device_gained", device=number, node=notice.node)
        elif notice.device in self._held:
            one = self._held[notice.device]
            self._let_go(one, now + notice.within) if isinstance(notice, Leaves) else self._lose(
                one, "its lease is over"
            )

    def _move_on(self, one: _Member, now: float) -> None:
        """What has become of a device since the last step."""
        if one.until is not None:
            if not one.joined or now >= one.until or one.number not in self._in_server():
                self._end(one)
                self._source.vacated(one.name)
                self._source.tell("device_returned", device=one.number)
        elif self._server is not None and not one.joined and one.device.loaded and one.number not in self._in_server():
            self._server.join(one.number, one.device, one.device.models)
            self._join(one)

    def _join(self, one: _Member) -> None:
        one.joined, one.device.changed = True, lambda: self._give(one)
        self._give(one)

    def _give(self, one: _Member) -> None:
        """Tell the server which models the device has. One that is lost has them again when it is back."""
        if self._server is not None and not one.device.lost:
            self._server.hold(one.number, one.device.models)

    def _give_back(self, now: float) -> None:
        """Let the devices with the largest numbers go that the load does not want; batches go to small numbers."""
        staying = sorted((one for one in self._held.values() if one.until is None), key=lambda one: one.number)
        surplus = staying[self.wanted :]
        self._spare_since = None if not surplus else now if self._spare_since is None else self._spare_since
        if self._spare_since is not None and now - self._spare_since >= SPARE_S:
            for one in surplus:
                self._let_go(one, math.inf)

    def _let_go(self, one: _Member, until: float) -> None:
        """The device gets no batch any more. It is given back when its last one is answered, at ``until`` at most."""
        if one.until is None and one.joined and self._server is not None:
            self._server.leave(one.number)
        one.until = until if one.until is None else min(one.until, until)

    def _lose(self, one: _Member, why: str) -> None:
        self._let_go(one, -math.inf)
        self._end(one)
        self._source.tell("device_lost", device=one.number, reason=why)

    def _end(self, one: _Member) -> None:
        one.device.changed = lambda: None
        one.device.stop()
        del self._held[one.name]

    def _stays(self, one: _Member) -> bool:
        return one.until is None and self._held.get(one.name) is one

    def _free_number(self) -> int:
        """The smallest number that no device has, nor one that the server has not let go yet."""
        taken = {one.number for one in self._held.values()} | self._in_server()
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def _in_server(self) -> frozenset[int]:
        return frozenset() if self._server is None else self._server.devices


class OwnDevices:
    """``least`` devices from the start of the service to its end, as a `Source`.

    resources: those of a device of ``stages`` processes. One with any is held by a placement group, whichever
    processes are in it. The group bears the actor's name, so that a front that was restarted finds it.
    """

    waits = ""

    def __init__(self, least: int, resources: Mapping[str, float], stages: int = 1):
        self.least = least
        self._bundles = (
            [bundle] * stages if (bundle := {name: each for name, each in resources.items() if each}) else []
        )
        self._groups: list[Any] = []
        self._told = 0

    async def poll(self) -> Sequence[Notice]:
        while (number := len(self._groups)) < self.least:
            self._groups.append(await asyncio.to_thread(_held, number, self._bundles) if self._bundles else None)
        # Those before one that failed are told of when it is there, too.
        came, self._told = [Came(one, self._groups[one]) for one in range(self._told, self.least)], self.least
        return came

    def wanted(self, load: int) -> int:
        return self.least

    def vacated(self, device: Hashable) -> None:
        """It is kept."""

    def tell(self, event: str, **fields: Any) -> None:
        """The log says at its beginning how many there are."""

    async def close(self) -> None:
        for group in filter(None, self._groups):
            await asyncio.to_thread(remove_placement_group, group)


def _held(number: int, bundles: list[dict[str, float]]) -> Any:
    """The placement group that holds this device for this actor, with a bundle for each of its processes."""
    name = f"serving-{ray.get_runtime_context().get_actor_id()}-{number}"
    try:
        return get_placement_group(name)
    except ValueError:
        return placement_group(bundles, name=name)
