"""The devices of a service of several models, of which each device has those that are placed on it.

`symphony_serve.replacement` decides when the models are placed anew and by which steps, and
`symphony_serve.placement.replanning` where. Here it is told what has become of the processes, and what it says is what
each device is to have. A model that has no room comes when it is asked. One that does not load is left out, and the
others are served, unless the service starts for the first time. All times are seconds, all memory is bytes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ray import cloudpickle

from fluidtune.ray_compat import kept_state
from fluidtune.serving.device import Device
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.process import LOOK_S
from fluidtune.serving.service_devices import Devices, First, Source
from fluidtune.serving.setting import PlacedModel, Setting
from symphony_serve import replacement
from symphony_serve.errors import ServeError
from symphony_serve.making_room import Demand
from symphony_serve.placement.replanning import ALONE, Placement, replanned
from symphony_serve.placement.served_models import Cut, ServedModel
from symphony_serve.profiles import Profile, check_slo
from symphony_serve.shell.async_server import AsyncServer
from symphony_serve.shell.measuring import measure_profile

logger = logging.getLogger(__name__)

#: Rates are measured over this many seconds; as `autoscale.WINDOW_S`, in which noise and a burst even out.
WINDOW_S = 10.0
#: Rates must differ for so long at the least before there is a search; two windows, so that one burst is not enough.
LEAST_PATIENCE_S = 2 * WINDOW_S
#: Seconds without any process after which a device is down. Judgement: a process that has ended is mostly back by then.
DOWN_S = 10.0


class PlacedDevices(Devices):
    """See the module. source: of the devices. start: as for `Devices`. tell: is called with an event and its fields.

    offered: the requests to each model so far, as `watching.demand` counts them.
    """

    def __init__(
        self,
        setting: Setting,
        source: Source,
        start: Callable[[int, Any], Device],
        tell: Callable[..., None],
        offered: Callable[[], Mapping[str, int]],
    ):
        assert setting.placing is not None
        super().__init__(source, start, lambda number: {key: self._loading[key] for key in self._given(number)})
        self._placing, self._tell_log, self._offered = setting.placing, tell, offered
        self._loading = setting.loading.each()
        self._asked: dict[str, PlacedModel] = {one.name: one for one in setting.placing.models}
        self._max_batch = setting.max_batch
        self._samples: dict[str, Samples] = {}
        self._models: list[ServedModel] = []
        #: By model, how many inputs were asked for since the machine was told last.
        self._inputs: Counter[str] = Counter()
        #: By model, how often a device has loaded it since the service answers, and its seconds at its first load.
        self._loads: Counter[str] = Counter()
        self._load_s: dict[str, float] = {}
        #: By device, the model that is loaded there to see its bytes and seconds.
        self._tried: dict[int, str] = {}
        #: By model, its profile before Ray restarted the front, or as it was seen at its first load.
        self._profiles: dict[str, Profile] = {}
        #: Whether the service starts for the first time, and not after Ray has restarted the front.
        self._is_new = True
        #: Why models were not loaded when that was last tried.
        self._failed: dict[str, str] = {}
        self._state: replacement.PlacementState | None = None
        #: By device and model, when a load began that is measured; by device, since when it has no process.
        self._began: dict[tuple[int, str], float] = {}
        self._without: dict[int, float] = {}
        #: Why the latest search was begun, and where the models were placed last and why, for the status.
        self._why, self._said = "the service starts", ""
        #: What the latest search foresees: the part of the requests that is answered in time.
        self._attainment = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def _given(self, number: int) -> frozenset[str]:
        """The models that a device is to have now."""
        if self._state is None:
            return frozenset({self._tried[number]} if number in self._tried else ())
        return self._state.devices[number].all

    # The start.

    async def _load_first(self) -> First:
        """Load each model once to see its bytes and seconds, find where they stand, and load them there.

        Where a front was before, bytes and seconds are known. Raises ServeError if a model cannot be loaded; where a
        front was before, if none can.
        """
        await super()._load_first()
        kept = await asyncio.to_thread(kept_state.kept, self._key)
        if kept is not None:
            self._models, self._samples, self._profiles, self._load_s = cloudpickle.loads(kept)
            self._is_new = False
        else:
            self._models = await self._measured()
        rates = {one.name: one.rate for one in self._placing.models}
        sizes = {one.name: one.cuts[ALONE].bytes for one in self._models}
        places = {number: replacement.Device(self._given(number)) for number in self.present}
        demands = {name: Demand(seconds) for name, seconds in self._load_s.items()}
        self._state = replacement.PlacementState(
            sizes, self._placing.memory, places, LEAST_PATIENCE_S, rates, demands=demands
        )
        loaded = time.monotonic()
        self._hear(replacement.Found(self._state.searches, await self._found(rates, tuple(places))))
        while self._state.phase in ("searching", "moving") and not (self._failed and self._is_new):
            await asyncio.sleep(LOOK_S)
            self._look()
        missing = {name for name in self._asked if not self._state.stands(name)}
        if self._failed and (self._is_new or missing == self._asked.keys()):
            raise ServeError(next(iter(self._failed.values())))
        # To place them took the one or the other: each model was loaded once, and then again where it stands.
        patience = max(LEAST_PATIENCE_S, time.monotonic() - loaded, sum(self._load_s.values()) / len(places))
        self._state = replace(self._state, patience=patience)
        return First(self.present, self._samples, {name: self._profiles[name] for name in missing})

    @property
    def _key(self) -> str:
        """What the service knows of its models is kept by this name for a front that Ray restarts."""
        return f"{kept_state.own_name()}-models"

    async def _measured(self) -> list[ServedModel]:
        """The models, each loaded and run on one device, and no two at a time on one. Raises ServeError."""
        waiting = list(self._asked)
        found: dict[str, ServedModel] = {}

        async def on(number: int, device: Device) -> None:
            while waiting:
                name, began = waiting.pop(0), time.monotonic()
                self._tried[number] = name
                self.reconcile()
                await device.processes[name].loaded()
                self._load_s[name] = time.monotonic() - began
                found[name] = await self._look_at(name, device)

        tasks = [asyncio.create_task(on(*one), name="serve-size") for one in self.present.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [found[name] for name in self._asked]

    async def _look_at(self, name: str, device: Device) -> ServedModel:
        asked, process = self._asked[name], device.processes[name]
        self._samples[name] = process.samples
        # One that may have no room is not measured later.
        most = 1 if self._placing.memory == math.inf else self._max_batch
        profile = await measure_profile([process.measure], process.samples.inputs, asked.slo, most)
        check_slo(name, profile, asked.slo)
        self._profiles[name] = profile
        size = asked.bytes if asked.bytes is not None else float(process.bytes)
        return ServedModel(name, {ALONE: Cut((profile.seconds(1),), size)}, asked.slo, asked.weight)

    # What the front calls.

    def anew(self) -> None:
        self._end_tasks()
        self._state, self._failed, self._tried = None, {}, {}
        super().anew()

    def serve(self, server: AsyncServer, wanted: Callable[[], int]) -> None:
        self._first = list(self._held.values())
        super().serve(server, wanted)
        self._begin(self._watch())
        if self._is_new:
            profiles = {name: server.profile(name) for name in self._asked}
            known = cloudpickle.dumps((self._models, self._samples, profiles, self._load_s))
            self._begin(asyncio.to_thread(kept_state.keep, self._key, known))

    async def close(self) -> None:
        self._end_tasks()
        await super().close()
        await asyncio.to_thread(kept_state.forget, self._key)

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def asks(self, model: str, inputs: int) -> None:
        self._inputs[model] += inputs

    @property
    def unavailable(self) -> dict[str, str]:
        """By model that no device has because it did not load, the reason. One that is about to load is not in it."""
        left_out = self._state.failed if self._state is not None else ()
        return {name: why for name, why in self._failed.items() if name in left_out}

    def comes_in(self, name: str) -> float | None:
        """Seconds until the model is in memory when it is asked, of a load now if it was lost; None: it is there."""
        state, now = self._state, time.monotonic()
        if state is None or state.stands(name):
            return None
        began = [self._began.get((number, name), now) for number, one in state.devices.items() if name in one.loads]
        return max(0.0, state.demands.get(name, Demand()).load - (now - min(began, default=now)))

    def comes(self, name: str) -> bool:
        """Whether the model is not in memory and comes when it is asked, or loads. Not: its process was lost."""
        up = self._state.up if self._state is not None else {}
        loading = [(number, name) in self._began for number, one in up.items() if name in one.loads]
        return bool(up) and self.comes_in(name) is not None and (not loading or any(loading))

    def placement(self) -> dict[str, Any]:
        """For the status: the models of each device, what is done, why it was placed so, and what is not there."""
        state, unavailable = self._state, self.unavailable
        missing = [f"{name} is not loaded: {why}" for name, why in unavailable.items()]
        gone = [f"device {number} has no process" for number in self._without]
        return {
            "phase": state.phase if state is not None else "searching",
            "devices": {str(number): sorted(one.held) for number, one in state.devices.items()} if state else {},
            "bytes": {one.name: one.cuts[ALONE].bytes for one in self._models},
            "loads": {name: self._loads[name] for name in self._asked},
            "memory": self._placing.memory if self._placing.memory < math.inf else None,
            "why": "; ".join([self._said, *missing, *gone]),
            "unavailable": unavailable,
        }

    # The machine.

    def _hear(self, event: replacement.Event) -> None:
        assert self._state is not None
        before = self._state
        self._state, acts = replacement.handle(before, event)
        if isinstance(event, replacement.Found) and event.search == before.searches and before.searching:
            self._tell_placed(event.placement, before)
        for act in acts:
            self._do(act)
        self.reconcile()

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work, name="serve-place")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell_placed(self, placement: Mapping[int, frozenset[str]], before: replacement.PlacementState) -> None:
        same = all(before.devices[number].held == models for number, models in placement.items())
        self._said = f"{self._why}; {'they stand well' if same else 'placed anew'}, {self._attainment:.1%} foreseen"
        shown = {str(number): sorted(models) for number, models in placement.items()}
        self._tell_log("models_placed", devices=shown, reason=self._said, attainment=self._attainment)

    def _do(self, act: replacement.Act) -> None:
        """A load and an unload are done when `_look` sees that they are."""
        if isinstance(act, replacement.Search):
            self._begin(self._search(act))
        elif isinstance(act, replacement.Hold):
            if act.model not in self.present[act.device].processes:  # Else it stays after all, and nothing loads.
                self._began[act.device, act.model] = time.monotonic()
            self.present[act.device].stay(act.model)
        else:
            gap = "no device has it for a while: the memory leaves no other way" if act.last else "it stands elsewhere"
            if not act.last and self._state is not None and not self._state.stands(act.model):
                gap = "it makes room for a model that is asked more, or was asked later"
            self._moved(act.device, act.model, "unloaded", gap)
            self.present[act.device].leave(act.model)

    async def _search(self, act: replacement.Search) -> None:
        try:
            placement = await self._found(act.rates, act.devices)
        except Exception as error:
            logger.warning("No other placement of the models was found (%s); they stand as before", error)
            self._said = f"{self._why}; no other placement: {error}"
            self._tell_log("models_kept", reason=self._said)
            self._hear(replacement.NotFound(act.number))
        else:
            self._hear(replacement.Found(act.number, placement))

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

    def _moved(self, number: int, model: str, what: str, why: str) -> None:
        self._tell_log("model_moved", trial=model, device=number, what=what, reason=why)

    # What has become of the processes.

    async def _watch(self) -> None:
        """See which processes are there, and measure the rates."""
        last, counted = time.monotonic(), dict(self._offered())
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._look()
                now, asked, self._inputs = time.monotonic(), self._inputs, Counter()
                self._hear(replacement.Asked(now, asked))
                if now - last >= WINDOW_S:
                    offered = dict(self._offered())
                    rates = {name: (offered[name] - counted.get(name, 0)) / (now - last) for name in self._asked}
                    self._rate(replacement.Rates(now, rates, now - last))
                    last, counted = now, offered
            except Exception:
                logger.exception("A look at the placement has failed")

    def _look(self) -> None:
        """Tell the machine where what is differs from what it takes to be."""
        for number, device in self.present.items():
            self._look_whether_up(number, device)
            for model, process in list(device.processes.items()):
                self._look_at_one(number, device, model, process.state == "ready", process.trouble)

    def _look_whether_up(self, number: int, device: Device) -> None:
        assert self._state is not None
        place, now = self._state.devices[number], time.monotonic()
        if device.models or (place.up and not device.processes):
            self._without.pop(number, None)
            if not place.up:
                self._why = f"device {number} is back"
                self._hear(replacement.Up(number))
        elif place.up and place.loads and now - self._without.get(number, now) > DOWN_S:
            self._why = f"device {number} has no process"
            self._began = {one: began for one, began in self._began.items() if one[0] != number}
            self._hear(replacement.Down(number))

    def _look_at_one(self, number: int, device: Device, model: str, ready: bool, trouble: str) -> None:
        assert self._state is not None
        place = self._state.devices[number]
        if model in place.held and not ready:
            if device.lost:
                self._without.setdefault(number, time.monotonic())
            self._hear(replacement.Lost(number, model))
        elif model in place.loads and ready:
            self._failed.pop(model, None)
            self._loads[model] += 1
            began = self._began.pop((number, model), None)
            seconds = time.monotonic() - began if began is not None else None
            self._moved(number, model, "loaded", f"in {seconds:.1f} s" if seconds is not None else "it is back")
            self._hear(replacement.Held(number, model, seconds))
        elif model in place.loads and trouble and place.up:  # On one that is down the next process tries it at once.
            logger.warning("Device %d could not load model %s: %s", number, model, trouble)
            self._failed[model] = trouble
            self._began.pop((number, model), None)
            self._moved(number, model, "failed", trouble)
            self._hear(replacement.NotHeld(number, model))
        elif model in place.drops and not (self._server is not None and self._server.busy_with(number, model)):
            self._hear(replacement.Dropped(number, model))

    def _rate(self, event: replacement.Rates) -> None:
        assert self._state is not None
        planned = self._state.planned
        if self._state.phase in ("settled", "drifting"):
            changes = [f"{name} {planned.get(name, 0.0):.3g} to {rate:.3g}" for name, rate in event.rates.items()]
            changed = f"requests/s changed: {', '.join(changes)}"
            self._why = f"a device lacks {', '.join(lacking)}" if (lacking := self._state.lacking) else changed
        self._hear(event)
