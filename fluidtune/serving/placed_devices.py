"""The devices of a service of several models, of which each device holds those that are placed on it.

`symphony_serve.replacement` decides when the models are placed anew and by which steps, and
`symphony_serve.placement.replanning` where; here it is carried out, beside the requests, on the front's event loop. A
model that does not load is left out, and the others are served, unless the service starts for the first time. All times
are seconds, all memory is bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from ray import cloudpickle

from fluidtune.ray_compat import kept_state
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.remote_devices import LOOK_S, PlacedDevice
from fluidtune.serving.served_devices import First, OwnDevices
from fluidtune.serving.setting import PlacedModel, Setting
from symphony_serve.errors import ServeError
from symphony_serve.placement.replanning import ALONE, Placement, replanned
from symphony_serve.placement.served_models import Cut, ServedModel
from symphony_serve.profiles import Profile, check_slo
from symphony_serve.replacement import (
    Act,
    Device,
    Down,
    Drop,
    Dropped,
    Event,
    Found,
    Held,
    Hold,
    NotFound,
    NotHeld,
    Rates,
    Search,
    Standing,
    Up,
    handle,
)
from symphony_serve.shell.async_server import AsyncServer
from symphony_serve.shell.measuring import measure_profile

logger = logging.getLogger(__name__)

#: Rates are measured over this many seconds; as `autoscale.WINDOW_S`, in which noise and a burst even out.
WINDOW_S = 10.0
#: Rates must differ for so long at the least before there is a search; two windows, so that one burst is not enough.
LEAST_PATIENCE_S = 2 * WINDOW_S
#: Seconds between two looks whether a batch that is on its way has ended.
DRAIN_S = 0.005


class PlacedDevices:
    """See the module. own: the devices, which begin without a model. tell: is called with an event and its fields.

    offered: the requests to each model so far, as `watching.demand` counts them. Implements `ServedDevices`.
    """

    waits = trouble = ""

    def __init__(
        self,
        setting: Setting,
        own: OwnDevices[PlacedDevice],
        tell: Callable[..., None],
        offered: Callable[[], Mapping[str, int]],
    ):
        assert setting.placing is not None
        self._placing, self._own, self._tell_log, self._offered = setting.placing, own, tell, offered
        self._trials = {trial.name: trial for trial in setting.loading.trials}
        self._asked: dict[str, PlacedModel] = {one.name: one for one in setting.placing.models}
        self._devices: dict[int, PlacedDevice] = {}
        self._samples: dict[str, Samples] = {}
        self._models: list[ServedModel] = []
        #: By model, its profile before Ray restarted the front; None: the service starts for the first time.
        self._profiles: dict[str, Profile] | None = None
        #: Why models were not loaded when that was last tried.
        self._failed: dict[str, str] = {}
        self._state: Standing | None = None
        self._server: AsyncServer | None = None
        #: Why the latest search was begun, and where the models were placed last and why, for the status.
        self._why, self._said = "the service starts", ""
        #: What the latest search foresees: the part of the requests that is answered in time.
        self._attainment = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        return self._own.count

    @property
    def pids(self) -> list[int]:
        return self._own.pids

    # The start.

    async def first(self) -> First:
        """Load each model once to see its bytes and seconds, find where they stand, and load them there.

        Where a front was before, bytes and seconds are known. Raises ServeError if a model cannot be loaded; where a
        front was before, if none can.
        """
        self._devices = dict((await self._own.first()).devices)  # type: ignore[arg-type]
        began = time.monotonic()
        kept = await asyncio.to_thread(kept_state.kept, self._key)
        if kept is not None:
            self._models, self._samples, self._profiles = cloudpickle.loads(kept)
        else:
            self._models = await self._measured()
        rates = {one.name: one.rate for one in self._placing.models}
        devices = {number: Device(device.models) for number, device in self._devices.items()}
        sizes = {one.name: one.cuts[ALONE].bytes for one in self._models}
        self._state = Standing(sizes, self._placing.memory, devices, LEAST_PATIENCE_S, rates)
        self._heed_losses()
        loaded = time.monotonic()
        self._tell(Found(self._state.searches, await self._found(rates, tuple(devices))))
        while self._state.phase in ("searching", "moving") and not (self._failed and self._profiles is None):
            await asyncio.sleep(LOOK_S)
            await self._look()
        missing = {name for name in self._asked if not self._state.stands(name)}
        if self._failed and (self._profiles is None or missing == self._asked.keys()):
            raise ServeError(next(iter(self._failed.values())))
        # To place them took the one or the other: each model was loaded once, and then again where it stands.
        patience = max(LEAST_PATIENCE_S, time.monotonic() - loaded, loaded - began)
        self._state = replace(self._state, patience=patience)
        held = {number: one.held for number, one in self._state.devices.items()}
        profiles = {name: one for name, one in (self._profiles or {}).items() if name in missing}
        for device in self._devices.values():
            device.lost = lambda: None  # Until `serve` its models are measured, and loaded again if it is lost.
        return First(self._devices, self._samples, held, profiles)

    @property
    def _key(self) -> str:
        """What the service knows of its models is kept by this name for a front that Ray restarts."""
        return f"{kept_state.own_name()}-models"

    async def _measured(self) -> list[ServedModel]:
        """The models, each loaded and run on one device, and no two at a time on one. Raises ServeError."""
        waiting = list(self._trials)
        found: dict[str, ServedModel] = {}

        async def on(device: PlacedDevice) -> None:
            while waiting:
                name = waiting.pop(0)
                for model in device.models:
                    await device.unload(model)
                found[name] = await self._look_at(name, device)

        tasks = [asyncio.create_task(on(device), name="serve-size") for device in self._devices.values()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [found[name] for name in self._trials]

    async def _look_at(self, name: str, device: PlacedDevice) -> ServedModel:
        asked = self._asked[name]
        held = await device.load(self._trials[name])
        inputs = held.samples.inputs
        self._samples[name] = held.samples
        profile = await measure_profile([lambda batch: device.measure(name, batch)], inputs, asked.slo, 1)
        check_slo(name, profile, asked.slo)
        size = asked.bytes if asked.bytes is not None else float(held.bytes)
        return ServedModel(name, {ALONE: Cut((profile.seconds(1),), size)}, asked.slo, asked.weight)

    # What the front calls.

    async def interrupted(self) -> bool:
        return False

    def anew(self) -> None:
        self._end_tasks()
        self._own.anew()
        self._state, self._failed = None, {}

    def serve(self, server: AsyncServer, wanted: Callable[[], int]) -> None:
        self._server = server
        self._heed_losses()
        self._watching = asyncio.create_task(self._watch(), name="serve-placement")
        if self._profiles is None:
            self._profiles = {name: server.profile(name) for name in self._asked}
            known = cloudpickle.dumps((self._models, self._samples, self._profiles))
            self._begin(asyncio.to_thread(kept_state.keep, self._key, known))

    async def close(self) -> None:
        self._end_tasks()
        await self._own.close()
        await asyncio.to_thread(kept_state.forget, self._key)

    def _end_tasks(self) -> None:
        for task in (self._watching, *self._tasks):
            if task is not None:
                task.cancel()

    @property
    def unavailable(self) -> dict[str, str]:
        """By model that no device has because it did not load, the reason. One that is about to load is not in it."""
        left_out = self._state.failed if self._state is not None else ()
        return {name: why for name, why in self._failed.items() if name in left_out}

    def placement(self) -> dict[str, Any]:
        """For the status: the models of each device, what is done, why it was placed so, and what is not there."""
        state, unavailable = self._state, self.unavailable
        missing = [f"{name} is not loaded: {why}" for name, why in unavailable.items()]
        lost = {number: device.trouble for number, device in self._devices.items() if device.trouble}
        gone = [f"device {number} has no process: {why}" for number, why in lost.items()]
        return {
            "phase": state.phase if state is not None else "searching",
            "devices": {str(number): sorted(one.held) for number, one in state.devices.items()} if state else {},
            "bytes": {one.name: one.cuts[ALONE].bytes for one in self._models},
            "memory": self._placing.memory if self._placing.memory < float("inf") else None,
            "why": "; ".join([self._said, *missing, *gone]),
            "unavailable": unavailable,
        }

    # The machine.

    def _tell(self, event: Event) -> None:
        assert self._state is not None
        before = self._state
        self._state, acts = handle(before, event)
        if isinstance(event, Found) and event.search == before.searches and before.searching:
            self._tell_placed(event.placement, before)
        for act in acts:
            self._begin(self._do(act))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="serve-place")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell_placed(self, placement: Mapping[int, frozenset[str]], before: Standing) -> None:
        same = all(before.devices[number].held == models for number, models in placement.items())
        self._said = f"{self._why}; {'they stand well' if same else 'placed anew'}, {self._attainment:.1%} foreseen"
        shown = {str(number): sorted(models) for number, models in placement.items()}
        self._tell_log("models_placed", devices=shown, reason=self._said, attainment=self._attainment)

    async def _do(self, act: Act) -> None:
        if isinstance(act, Search):
            await self._search(act)
        elif isinstance(act, Hold):
            await self._hold(act)
        else:
            await self._drop(act)

    async def _search(self, act: Search) -> None:
        try:
            placement = await self._found(act.rates, act.devices)
        except Exception as error:
            logger.warning("No other placement of the models was found (%s); they stand as before", error)
            self._said = f"{self._why}; no other placement: {error}"
            self._tell_log("models_kept", reason=self._said)
            self._tell(NotFound(act.number))
        else:
            self._tell(Found(act.number, placement))

    async def _found(self, rates: Mapping[str, float], devices: tuple[int, ...]) -> Placement:
        """Search in a thread, so that requests are answered meanwhile."""
        assert self._state is not None
        held = {number: self._state.devices[number].held for number in devices}
        cvs = {one.name: one.cv for one in self._placing.models}
        until = time.monotonic() + self._placing.seconds
        found, self._attainment = await asyncio.to_thread(
            replanned, self._models, rates, cvs, held, self._placing.memory, lambda: time.monotonic() > until
        )
        return found

    async def _hold(self, act: Hold) -> None:
        began = time.monotonic()
        try:
            await self._devices[act.device].load(self._trials[act.model])
        except Exception as error:
            logger.warning("Device %d could not load model %s: %s", act.device, act.model, error)
            self._failed[act.model] = str(error) if isinstance(error, ServeError) else repr(error)
            self._moved(act, "failed", self._failed[act.model])
            self._tell(NotHeld(act.device, act.model))
            return
        self._failed.pop(act.model, None)
        self._moved(act, "loaded", f"in {time.monotonic() - began:.1f} s")
        self._tell(Held(act.device, act.model))
        self._give(act.device)

    async def _drop(self, act: Drop) -> None:
        self._give(act.device)
        if self._server is not None:
            while not self._server.closed and self._server.busy_with(act.device, act.model):
                await asyncio.sleep(DRAIN_S)
        await self._devices[act.device].unload(act.model)
        gap = "no device has it for a while: the memory leaves no other way" if act.last else "it stands elsewhere"
        self._moved(act, "unloaded", gap)
        self._tell(Dropped(act.device, act.model))

    def _moved(self, act: Hold | Drop, what: str, why: str) -> None:
        self._tell_log("model_moved", trial=act.model, device=act.device, what=what, reason=why)

    def _give(self, number: int) -> None:
        """Tell the server which models the device has."""
        assert self._state is not None
        if self._server is not None:
            self._server.hold(number, self._state.devices[number].held)

    # What happens meanwhile.

    async def _watch(self) -> None:
        """See which processes are there, and measure the rates."""
        last, counted = time.monotonic(), dict(self._offered())
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
                now = time.monotonic()
                if now - last >= WINDOW_S:
                    offered = dict(self._offered())
                    rates = {name: (offered[name] - counted.get(name, 0)) / (now - last) for name in self._asked}
                    self._rate(Rates(now, rates, now - last))
                    last, counted = now, offered
            except Exception:
                logger.exception("A look at the placement has failed")

    def _heed_losses(self) -> None:
        for number, device in self._devices.items():
            device.lost = functools.partial(self._lost, number)

    def _lost(self, number: int) -> None:
        """The process of the device is gone, with its models: the server must know before the next one is there."""
        self._why = f"the process of device {number} is gone"
        self._tell(Down(number))
        self._give(number)

    async def _look(self) -> None:
        assert self._state is not None
        for number, device in self._devices.items():
            if device.pid is None:
                with contextlib.suppress(ServeError):  # It is tried again and told where it was missed.
                    await device.look(0.0)
            if device.pid is not None and not self._state.devices[number].up:
                self._why = f"the process of device {number} is back"
                self._tell(Up(number))

    def _rate(self, event: Rates) -> None:
        assert self._state is not None
        planned = self._state.planned
        if self._state.phase in ("settled", "drifting"):
            changes = [f"{name} {planned.get(name, 0.0):.3g} to {rate:.3g}" for name, rate in event.rates.items()]
            lacking = [name for name in self._asked if not self._state.stands(name)]
            changed = f"requests/s changed: {', '.join(changes)}"
            self._why = f"no device has {', '.join(lacking)}" if lacking else changed
        self._tell(event)
