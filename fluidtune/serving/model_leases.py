"""The devices of a service that shares the cluster: leases of the Themis arbiter, each with a model process.

Decided here: when the device of a lease joins the server, when it leaves, and which one goes when the load wants fewer.
`watching` says how many the load wants, and themis_bridge which app gets a lease. All times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fluidtune.cluster.devices.holding import SPARE_S
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.remote_devices import PAUSE_S
from fluidtune.serving.served_devices import First
from fluidtune.serving.versioned_device import VersionedDevice
from symphony_serve.errors import ServeError
from symphony_serve.shell.async_server import AsyncServer
from themis_bridge import ThemisError
from themis_bridge.agent import Gained, Leave, Notice
from themis_bridge.messages import Report
from themis_bridge.shell.tenant import POLL_S, Tenant

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Leasing:
    """How a service leases devices.

    app: its name at the arbiter. user: whose it is; "": it is the only app of its user. unit: "GPU" or "CPU".
    most: how many devices it may hold; None: any number.
    """

    app: str
    user: str
    unit: str
    most: int | None


@dataclass(eq=False)
class _Leased:
    """A lease and its device. The device loads, then it is ready, then it has joined the server, then it leaves.

    samples: of each model; None: it loads. again: when its process is to be started anew, because it could not load.
    until: when it is given back at the latest; None: it stays.
    """

    lease: Gained
    number: int
    device: VersionedDevice
    samples: dict[str, Samples] | None = None
    error: ServeError | None = None
    again: float = math.inf
    joined: bool = False
    until: float | None = None


class ModelLeases:
    """See the module. It is the front's `ServedDevices` and the agent's `themis_bridge.agent.Work`.

    start: makes the device of a number in a placement group. tell: is called with an event and its fields when a lease
    comes or goes. tenant, clock: others in tests.

    Raises ServeError if the arbiter refuses the service, for example because another app has its name.
    """

    def __init__(
        self,
        leasing: Leasing,
        start: Callable[[int, Any], VersionedDevice],
        tell: Callable[..., None],
        tenant: Callable[..., Tenant] = Tenant,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._leasing, self._start, self._tell, self._clock = leasing, start, tell, clock
        #: By GPU and token.
        self._held: dict[tuple[str, int], _Leased] = {}
        #: What `first` has returned, and what it is to raise.
        self._first: _Leased | None = None
        self._error: ServeError | None = None
        self._server: AsyncServer | None = None
        self._load_wants: Callable[[], int] = lambda: 1
        #: Since when there are more devices than the load wants; None: there are not.
        self._spare_since: float | None = None
        self.count, self.trouble = 0, ""
        self._task: asyncio.Task[None] | None = None
        bundle = {leasing.unit: 1.0}
        try:
            self._tenant = tenant(leasing.app, self, bundle, leasing.unit, leasing.user)
        except ThemisError as error:
            raise ServeError(str(error)) from error

    # What the agent asks, in its own thread.

    def report(self) -> Report:
        return Report(endless=self.wanted)

    @property
    def wanted(self) -> int:
        """How many devices the load wants, of those that the service may hold; at least 1."""
        wanted = self._load_wants()
        return max(1, wanted if self._leasing.most is None else min(wanted, self._leasing.most))

    # What the front calls.

    @property
    def pids(self) -> list[int]:
        return [pid for one in list(self._held.values()) for pid in one.device.pids]

    @property
    def waits(self) -> str:
        return "" if self._held else f"waiting for a lease of a {self._leasing.unit}"

    async def first(self) -> First:
        """As `ServedDevices` says; the models are loaded in one device, others may come later."""
        self._first = None
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="serve-leases")
        while True:
            await asyncio.sleep(POLL_S)
            if self.trouble:
                raise ServeError(self.trouble)
            error, self._error = self._error, None
            if error is not None:
                raise error
            for one in self._held.values():
                if one.samples is not None and one.until is None:
                    self._first = one
                    return First({one.number: one.device}, one.samples)

    async def interrupted(self) -> bool:
        await asyncio.sleep(PAUSE_S)  # The arbiter's word may come a little later than the end of a process.
        return self._first is not None and not self._stays(self._first)

    def anew(self) -> None:
        for one in self._held.values():
            self._load_again(one)

    def serve(self, server: AsyncServer, wanted: Callable[[], int]) -> None:
        self._server, self._load_wants = server, wanted
        if self._first is not None and self._stays(self._first):
            self._first.joined = True
        elif self._first is not None:
            server.leave(self._first.number)
        self._count()

    async def close(self) -> None:
        """Give all leases back and leave the arbiter."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for one in self._held.values():
            one.device.stop()
        self._held.clear()
        self._count()
        await asyncio.to_thread(self._tenant.close)

    # The task.

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.step()
            except ThemisError as error:
                self._refused(str(error))
                return
            except Exception:
                logger.exception("A look at the leases has failed")

    async def step(self) -> None:
        """Take in what the arbiter has said and what has become of the processes. One task calls it."""
        now = self._clock()
        for notice in self._tenant.poll():
            self._take(notice, now)
        for one in list(self._held.values()):
            await self._move_on(one, now)
        self._give_back(now)
        self._count()

    def _take(self, notice: Notice, now: float) -> None:
        key = notice.gpu.id, notice.token
        if isinstance(notice, Gained):
            number = self._free_number()
            device = self._start(number, self._tenant.group(*key))
            self._held[key] = _Leased(notice, number, device)
            self._tell("device_gained", device=number, node=notice.gpu.machine)
        elif key in self._held:
            if isinstance(notice, Leave):
                self._let_go(self._held[key], now + notice.within)
            else:
                self._lose(self._held[key], "its lease is over")

    async def _move_on(self, one: _Leased, now: float) -> None:
        """What has become of a device since the last step."""
        if one.until is not None:
            if not one.joined or now >= one.until or one.number not in self._in_server():
                one.device.stop()
                key = one.lease.gpu.id, one.lease.token
                del self._held[key]
                self._tenant.vacated(*key)
                self._tell("device_returned", device=one.number)
        elif now >= one.again:
            # Its lease has not ended since, so that it was the models that could not be loaded.
            self._error = one.error
            self._load_again(one)
        elif one.samples is None:
            await self._look(one, now)
        elif self._server is not None and not one.joined and one.number not in self._in_server():
            self._server.join(one.number, one.device)
            one.joined = True

    async def _look(self, one: _Leased, now: float) -> None:
        if one.again == math.inf:
            try:
                one.samples = await one.device.look(0.0)
            except ServeError as error:
                logger.warning("The models do not load on device %d: %s", one.number, error)
                one.error, one.again = error, now + PAUSE_S

    def _give_back(self, now: float) -> None:
        """Let the devices with the largest numbers go that the load does not want; batches go to small numbers."""
        staying = sorted((one for one in self._held.values() if one.until is None), key=lambda one: one.number)
        surplus = staying[self.wanted :]
        self._spare_since = None if not surplus else now if self._spare_since is None else self._spare_since
        if self._spare_since is not None and now - self._spare_since >= SPARE_S:
            for one in surplus:
                self._let_go(one, math.inf)

    def _let_go(self, one: _Leased, until: float) -> None:
        """The device gets no batch any more. It is given back when its last one is answered, at ``until`` at most."""
        if one.until is None and one.joined and self._server is not None:
            self._server.leave(one.number)
        one.until = until if one.until is None else min(one.until, until)

    def _lose(self, one: _Leased, why: str) -> None:
        self._let_go(one, -math.inf)
        one.device.stop()
        del self._held[one.lease.gpu.id, one.lease.token]
        self._tell("device_lost", device=one.number, reason=why)

    def _load_again(self, one: _Leased) -> None:
        if not one.joined and one.until is None:
            one.device.again()
            one.samples, one.error, one.again = None, None, math.inf

    def _stays(self, one: _Leased) -> bool:
        return one.until is None and one in self._held.values()

    def _free_number(self) -> int:
        """The smallest number that no device has, nor one that the server has not let go yet."""
        taken = {one.number for one in self._held.values()} | self._in_server()
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def _in_server(self) -> frozenset[int]:
        return frozenset() if self._server is None else self._server.devices

    def _count(self) -> None:
        self.count = sum(one.joined and one.until is None for one in self._held.values())

    def _refused(self, why: str) -> None:
        """The arbiter does not want this service any more; what it held is lost."""
        logger.warning("The service has no leases any more: %s", why)
        for one in list(self._held.values()):
            self._lose(one, why)
        self._count()
        self.trouble = why
