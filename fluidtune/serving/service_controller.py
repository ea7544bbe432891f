"""A service from its start to its end: its devices, models and versions, and what it tells of itself.

A task starts the devices, measures them, and then makes the server. All is on the front's event loop. All times are
seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import ray

import fluidtune
from fluidtune.cluster.forks.forked import ForkedActors
from fluidtune.device_kinds import asked_for
from fluidtune.driver_lock import this_machine
from fluidtune.serving.address import url_of
from fluidtune.serving.answers import AGAIN_S, refused
from fluidtune.serving.capacity import PROFILES
from fluidtune.serving.device import Device
from fluidtune.serving.following import follow
from fluidtune.serving.intake import Intake, collect_seldom
from fluidtune.serving.model_process import Loading
from fluidtune.serving.openapi import document
from fluidtune.serving.placed_devices import PlacedDevices
from fluidtune.serving.process import Process
from fluidtune.serving.rollouts import Answering, Rollouts
from fluidtune.serving.service_devices import Devices, OwnDevices
from fluidtune.serving.setting import Setting
from fluidtune.serving.watching import MINUTE_S, Books, ServingGauges, ServingLog, Watch, are_kept, demand
from symphony_serve.autoscale import Autoscaler
from symphony_serve.errors import ServeError
from symphony_serve.profiles import profiles_to_json
from symphony_serve.shell.async_server import AsyncServer
from symphony_serve.shell.measuring import measure_models

logger = logging.getLogger(__name__)

#: Seconds that a stop waits for what runs. A batch that takes longer is late anyhow.
STOP_S = 1.0


class ServiceController:
    """The service of a setting. It belongs to the event loop that runs when it is made, and begins at once."""

    def __init__(self, setting: Setting):
        self._setting = setting
        self._names = [trial.name for trial in setting.loading.trials]
        #: What it does now, in one word, and in the state "failed" why.
        self.state, self._why = "loading", ""
        #: What answers, when the models are measured; what it runs on, when there is any; whether it ends.
        self.server: AsyncServer | None = None
        self.devices: Devices | None = None
        self.stopping = False
        #: The OpenAPI document of what is served; empty: the models are not there yet.
        self.document = b""
        #: The requests that are open.
        self.intake = Intake(setting.slo)
        self._forks: ForkedActors | None = None
        #: What is kept for `fluidtune serve plan`: profiles and delays of a time without overload.
        self._kept = ""
        self._log = ServingLog(Path(setting.folder))
        #: The versions, about which operators ask.
        self.rollouts = Rollouts(setting, self._log.write)
        self.books = Books(self.rollouts.keys)
        self._watch: Watch | None = None
        self._following: asyncio.Task[None] | None = None
        self._began = time.monotonic()
        self._tell_start()
        self._beginning = asyncio.get_running_loop().create_task(self._begin(), name="serve-begin")

    @property
    def doing(self) -> str:
        """What it does now, with what it waits for."""
        waits = self.devices.waits if self.devices is not None else ""
        if not waits and self.server is not None and not self.able(self.server):
            waits = "waiting for a model process"
        return waits if waits and self.state in ("loading", "serving") else self.state

    def able(self, server: AsyncServer, key: str = "") -> bool:
        """Whether a device can answer now for this model; "": for the one that ``POST /`` asks, or any of several."""
        if self._setting.placing is None:
            key = key or self.rollouts.versions.serving.key
        return server.able_for(key) if key else bool(server.able)

    @property
    def placed(self) -> PlacedDevices | None:
        """What it runs on, if each device has some of several models."""
        return self.devices if isinstance(self.devices, PlacedDevices) else None

    def own_slo(self, name: str) -> dict[str, float]:
        """The SLO of one of several models, which have each their own."""
        return {"slo_s": self._setting.slo_of(name)} if self._setting.placing is not None else {}

    def server_for(self, model: str) -> AsyncServer:
        """What answers for this model, or for "" at all. Raises `HTTPError` if nothing can, whatever the load is.

        A lost model process may be back in time.
        """
        if self.stopping:
            raise refused("stopping", "the service is being stopped", closes=True)
        if self.server is None or self.devices is None:
            raise refused(self.state, f"the models are not there yet: {self.doing}")
        if not self.devices.count:
            waits = self.devices.waits or "the models load"
            raise refused("no_lease", f"the service has no device now: {waits}")
        if self.placed is not None and (why := self.placed.unavailable.get(model)):
            raise refused("no_model_process", f"model {model} is not loaded: {why}")
        return self.server

    # What `fluidtune serve` asks.

    async def stop(self) -> None:
        """Refuse whatever comes from now on. Returns when what runs is answered, or after `STOP_S`, and all is kept."""
        self.stopping = True
        self._beginning.cancel()
        if self._following is not None:
            self._following.cancel()
        await asyncio.wait([self._beginning])
        if self.server is not None:
            await self.server.close(STOP_S)
        until = time.monotonic() + STOP_S
        while self.intake.open and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self.state = "ended"
        await self.rollouts.close()
        if self.server is not None:
            self._keep_profiles()
        if self.devices is not None:
            await self.devices.close()
        if self._watch is not None:
            self._watch.stop()
        self._log.write("serving_ended", seconds=time.monotonic() - self._began)
        await asyncio.to_thread(self._log.close, STOP_S)

    def status(self) -> dict[str, Any]:
        """What is served, and what has become of the requests."""
        pids, wanted = self.devices.processes if self.devices is not None else ([], 0)
        others = [
            {"trial": one.name, "version": 1, "state": "serving", "value": one.value, **self._figures(one.name)}
            for one in self._setting.loading.trials[1:]
        ]
        return {
            "name": self._setting.known.name,
            "user": self._setting.known.user,
            "url": url_of(self._setting.host, self._setting.port, ray.util.get_node_ip_address()),
            "state": self.doing,
            "why": self._why,
            "slo_s": self._setting.slo,
            "delays_s": next(iter(self._delays().values()), None),
            "seconds": time.monotonic() - self._began,
            "devices": self.devices.count if self.devices and self.server else self._setting.devices,
            "devices_wanted": self._watch.wanted if self._watch is not None else None,
            "app": self._setting.leasing.app if self._setting.leasing is not None else None,
            "log": str(self._log.directory) if self._log.directory is not None else None,
            "pid": os.getpid(),
            "device_pids": pids,
            "processes_wanted": wanted * self._setting.stages,
            "unanswered": self.server.unanswered if self.server is not None else 0,
            "model": self._names[0],
            "phase": self.rollouts.versions.phase,
            "stages": self.rollouts.stages(),
            "placement": self.placed.placement() if self.placed is not None else None,
            "trials": [*self.rollouts.status(self._figures), *others],
        }

    def _figures(self, key: str) -> dict[str, Any]:
        """What has become of the requests to a version, and how it answers."""
        there = self.server is not None and self.server.serves(key)
        goodput, p99 = self.books.pace(key)
        batches = self.books.total().batches.get(key, dict[int, int]())
        return {
            **self.own_slo(key),
            "batching": self.server.batching(key) if there else None,  # type: ignore[union-attr]
            "batch_1_s": self.server.profile(key).seconds(1) if there else None,  # type: ignore[union-attr]
            "requests": self.books.requests(key),
            "goodput": goodput,
            "p99_s": p99,
            "batches": {str(size): count for size, count in sorted(batches.items())},
        }

    def minute(self) -> list[tuple[int, str, int, float, float]]:
        """The batches of the last minute: device, trial, size, seconds from the minute's begin, seconds."""
        begin = time.monotonic() - MINUTE_S
        return [(one.device, one.model, one.size, one.sent - begin, one.seconds) for one in self.books.minute()]

    @property
    def trouble(self) -> str:
        """Why it can answer nothing any more, so that another front must be started; "" if nothing is wrong."""
        if self.server is None or self.devices is None or self.stopping:
            return ""
        return "the server was closed by an error" if self.server.closed else self.devices.trouble

    # The start.

    async def _begin(self) -> None:
        await self._until_done(self._prepare)
        await self._until_done(self._load_and_measure)

    async def _until_done(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do this, and do it again as long as it fails. Nobody awaits the start, so each error is said here."""
        while True:
            try:
                await step()
                return
            except Exception as error:
                try:
                    if self.devices is not None and await self.devices.interrupted():
                        continue
                    self._fail(error)
                    await self._clear()
                except Exception as another:
                    self._fail(another)
            await asyncio.sleep(AGAIN_S)

    def _fail(self, error: Exception) -> None:
        logger.error("The models cannot be served", exc_info=error)
        self._why = str(error) if isinstance(error, ServeError) else repr(error)
        self.state = "failed"
        self._log.write("serving_failed", reason=self._why)

    async def _clear(self) -> None:
        """Let go what an attempt that failed has left."""
        if self.devices is not None and self.devices.trouble:
            await self.devices.close()
            self.devices = None
        elif self.devices is not None:
            self.devices.anew()

    async def _prepare(self) -> None:
        """Start the servers of forks, and go on with the versions that were served before a restart."""
        if self._setting.modules is not None and self._forks is None:
            self._forks = await asyncio.to_thread(
                ForkedActors, self._setting.modules, self._setting.loading.environment
            )
        await self.rollouts.restore()
        if self.rollouts.keys[0] != self._names[0]:  # The first version, which is counted from the beginning.
            self.books.forget(self._names[0])
            self.books.add(self.rollouts.keys[0])

    async def _load_and_measure(self) -> None:
        setting = self._setting
        self.state = "loading"
        held = self.devices = self.devices or await self._get_devices()
        devices, samples, profiles = await held.first()
        self.state = "measuring"
        inputs = {key: some.inputs for key, some in samples.items()}
        models = await measure_models(
            [device.measured for device in devices.values()],
            inputs,
            {key: setting.slo_of(key) for key in self.rollouts.keys},
            setting.max_batch,
            profiles,
            setting.policy,
            setting.batching,
            setting.stages,
        )
        for model in models:
            seconds = model.profile.table[1:-1]
            self._log.write("model_measured", trial=model.name, seconds=seconds, delays=model.delays.margin)
        found = {model.name: Answering.of(model, samples[model.name], setting.max_body) for model in models}
        described = dict(zip(self._names, [one.samples for one in found.values()], strict=True))
        about = document(described, setting.slo, setting.token is not None)
        if setting.placing is not None and len(self._names) > 1:
            del about["paths"]["/"]["post"]
        self.document = json.dumps(about).encode()
        self.rollouts.answering.update(found)
        have = {number: device.models for number, device in devices.items()}
        self.server = AsyncServer(models, devices, self.books.batch, have)
        held.serve(self.server, lambda: self._watch.wanted if self._watch is not None else 1)
        self._note()
        self._keep_profiles()
        scaler = Autoscaler({one.name: (one.profile, one.budget) for one in models})
        gauges = ServingGauges(setting.known.name)
        self._watch = Watch(self.books, self._log, gauges, lambda: held.count, scaler, self._note)
        self._watch.start()
        self.rollouts.begin(self.server, self._watch, held)
        if setting.following is not None:
            following = follow(self.rollouts, setting.run, setting.following)
            self._following = asyncio.create_task(following, name="serve-follow")
        collect_seldom()
        self.state, self._why = "serving", ""

    async def _get_devices(self) -> Devices:
        setting = self._setting
        own = OwnDevices(setting.devices, setting.resources, setting.stages)
        if setting.placing is not None:
            tell = self._log.write
            return PlacedDevices(setting, own, self._start_device, tell, lambda: demand(self.books.total()))
        if setting.leasing is None:
            return Devices(own, self._start_device, self.rollouts.desired)
        # Here and not above: a service with devices of its own needs neither Themis nor its solver.
        from fluidtune.serving.model_leases import ModelLeases

        leases = await asyncio.to_thread(ModelLeases, setting.leasing, self._log.write)
        return Devices(leases, self._start_device, self.rollouts.desired)

    def _start_device(self, number: int, group: Any) -> Device:
        """A device without a model. ``group``: the placement group that holds it, if it is held."""
        setting, stages = self._setting, self._setting.stages

        def make(loading: Loading, changed: Callable[[], None]) -> Process:
            given = number, loading, setting.resources, group, self._log.write, changed, self._forks
            return Process(*given, stages, setting.room)

        # The server keeps to the profile, which has at most twice as many batches in the stages.
        return Device(make, 1 if stages == 1 else 2 * stages)

    def _tell_start(self) -> None:
        setting = self._setting
        self._log.write(
            "serving_started",
            run=setting.run,
            ray=ray.__version__,
            fluidtune=fluidtune.__version__,
            python=platform.python_version(),
            machine=this_machine(),
            kind=asked_for(setting.resources),
            devices=setting.devices,
            slo=setting.slo,
            starts=setting.policy.value,
            trials=[{"trial": one.name, "value": one.value} for one in setting.loading.trials],
        )

    def _note(self) -> None:
        """Take down the profiles as they are known now. It is called when there is no overload."""
        if self.server is not None:
            known, delays = {name: self.server.profile(name) for name in self.rollouts.keys}, self._delays()
            if are_kept(known, delays, self._setting.slo_of):
                self._kept = profiles_to_json(known, this_machine(), delays)

    def _keep_profiles(self) -> None:
        """Write the profiles that were taken down, for `fluidtune serve plan`."""
        if self._kept:
            self._log.keep(PROFILES, self._kept)

    def _delays(self) -> dict[str, float]:
        """By key, the seconds that an answer takes besides its batch."""
        return {key: one.model.delays.margin for key, one in self.rollouts.answering.items()}
