"""The front: the one replica of Ray Serve, with the scheduler in it. It reads requests and answers them.

A thread starts the devices, measures them and the way through Ray Serve, and then starts the server. Until then each
request is refused. All times are seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.requests import Request
from starlette.responses import Response

import fluidtune
from fluidtune.cluster.forks.forked import ForkedActors
from fluidtune.report import this_machine
from fluidtune.serving.answers import AGAIN_S, LIVE, READY, WAY, Said, as_json, of_server, refused, route, unknown
from fluidtune.serving.capacity import DIRECTORY, PROFILES
from fluidtune.serving.intake import Holding, Intake, collect_seldom, largest_body
from fluidtune.serving.model_process import Loading, Outcome
from fluidtune.serving.remote_devices import OwnDevices, RemoteDevice, ServedDevices
from fluidtune.serving.watching import MINUTE_S, Books, ServingGauges, ServingLog, Watch
from fluidtune.serving.way import TIMEOUT_S, Way
from symphony_serve.autoscale import Autoscaler
from symphony_serve.errors import Refused, ServeError
from symphony_serve.forms import Form
from symphony_serve.messages import Reason
from symphony_serve.model_side import Model, StartPolicy
from symphony_serve.profiles import check_slo, profiles_to_json
from symphony_serve.shell.measuring import measure_models
from symphony_serve.shell.threaded_server import ThreadedServer

if TYPE_CHECKING:
    from fluidtune.serving.model_leases import Leasing

logger = logging.getLogger(__name__)

#: Seconds that a stop waits for what runs. A batch that takes longer is late anyhow.
STOP_S = 1.0


@dataclass(frozen=True)
class Setting:
    """What is served, and how.

    run: the directory of the run. resources: Ray's options for a model process. devices: how many there are; 0: they
    are leases. leasing: how these are leased. modules: what model processes import, as far as is known; None: they are
    not forked. max_body: bytes of a request's body; None: `intake.largest_body` of the samples. url_host, port: where
    the front door is reached from this node.
    """

    run: str
    loading: Loading
    slo: float
    resources: dict[str, float]
    devices: int
    max_batch: int
    max_body: int | None
    policy: StartPolicy
    url_host: str
    port: int
    modules: tuple[str, ...] | None
    leasing: Leasing | None = None


class Front:
    """One thing: all that a replica of Ray Serve is called for.

    Answers HTTP requests: ``POST /`` asks the best trial, ``POST /TRIAL`` another one, ``GET /`` says what there is,
    ``GET /healthz`` whether the front lives, ``GET /readyz`` whether a model process can answer (503: none can).

    The body of a request is one input as a JSON value, that of an answer one output. Other answers are `Said`: a
    status, a code and a text. 400: the input is none. 404, 405: no such trial, no such method. 413: the body is too
    large. 415: it is compressed. 500: the model has failed with this input. 503: refused, with the reason, at the SLO
    at the latest.

    Called by a handle of Ray Serve, ``handle.remote(input)`` or ``handle.remote(input, trial)``, it returns the output.
    It raises `Refused` if there is no answer in time, and ServeError for an input or a trial that there is not.
    """

    def __init__(self, setting: Setting):
        self._setting = setting
        self._names = [trial.name for trial in setting.loading.trials]
        #: What it does now, in one word, and in the state "failed" why.
        self._state, self._why = "loading", ""
        self._server: ThreadedServer | None = None
        self._models: dict[str, Model] = {}
        #: By trial, the form of its inputs, and how many bytes the body of one may have.
        self._forms: dict[str, Form] = {}
        self._most: dict[str, int] = {}
        self._devices: ServedDevices | None = None
        self._forks: ForkedActors | None = None
        self._way: Way | None = None
        self._intake = Intake(setting.slo)
        #: What is kept for `fluidtune serve plan`: profiles and delays of a time without overload.
        self._kept = ""
        self._books = Books(self._names)
        self._log = ServingLog(Path(setting.run) / DIRECTORY)
        self._watch: Watch | None = None
        self._ends = threading.Event()
        self._began = time.monotonic()
        self._tell_start()
        threading.Thread(target=self._begin, name="serve-begin", daemon=True).start()

    # Called by Ray Serve.

    async def __call__(self, asked: Any, trial: str | None = None) -> Any:
        """Answer one HTTP request, or one call of a handle."""
        if not isinstance(asked, Request):
            return await self._call(asked, trial or self._names[0])
        try:
            return await self._http(asked)
        except Said as said:
            return said.response()

    async def stop(self) -> None:
        """Refuse whatever comes from now on. Returns when what runs is answered, or after `STOP_S`, and all is kept."""
        self._ends.set()
        if self._server is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._server.close, STOP_S)
        until = time.monotonic() + STOP_S
        while self._intake.open and time.monotonic() < until:
            await asyncio.sleep(0.01)
        await asyncio.get_running_loop().run_in_executor(None, self._finish)

    async def status(self) -> dict[str, Any]:
        """What is served, and what has become of the requests."""
        trials = []
        for trial in self._setting.loading.trials:
            profile = self._server.profile(trial.name) if self._server is not None else None
            trials.append(
                {
                    "trial": trial.name,
                    "value": trial.value,
                    "batch_1_s": profile.seconds(1) if profile is not None else None,
                    "requests": self._books.requests(trial.name),
                    "batches": {str(size): count for size, count in self._books.sizes(trial.name).items()},
                }
            )
        return {
            "state": self._doing,
            "why": self._why,
            "slo_s": self._setting.slo,
            "delays_s": next(iter(self._delays().values()), None),
            "seconds": time.monotonic() - self._began,
            "devices": self._devices.count if self._devices is not None else self._setting.devices,
            "devices_wanted": self._watch.wanted if self._watch is not None else None,
            "app": self._setting.leasing.app if self._setting.leasing is not None else None,
            "log": str(self._log.directory) if self._log.directory is not None else None,
            "pid": os.getpid(),
            "device_pids": self._devices.pids if self._devices is not None else [],
            "unanswered": self._server.unanswered if self._server is not None else 0,
            "trials": trials,
        }

    async def minute(self) -> list[tuple[int, str, int, float, float]]:
        """The batches of the last minute: device, trial, size, seconds from the minute's begin, seconds."""
        begin = time.monotonic() - MINUTE_S
        return [(one.device, one.model, one.size, one.sent - begin, one.seconds) for one in self._books.minute()]

    def check_health(self) -> None:
        """Raises RuntimeError if the server can answer nothing any more; Ray Serve then starts another front."""
        if self._server is not None and self._server.closed and not self._ends.is_set():
            raise RuntimeError("the server was closed by an error")
        if self._devices is not None and self._devices.trouble:
            raise RuntimeError(self._devices.trouble)

    def __del__(self) -> None:
        if self._server is not None:
            self._server.close(timeout=1.0)
        self._finish()

    def _finish(self) -> None:
        """Keep and write what is known at the end. Ray Serve kills a front that takes long, so `stop` has done it."""
        if self._state == "ended":
            return
        self._state = "ended"
        self._ends.set()
        if self._server is not None:
            self._keep_profiles()
        if self._devices is not None:
            self._devices.close()
        if self._watch is not None:
            self._watch.stop()
        self._log.write("serving_ended", seconds=time.monotonic() - self._began)
        self._log.close()

    # One request.

    async def _http(self, request: Request) -> Response:
        """Answer one HTTP request. Raises `Said`."""
        arrival = time.monotonic()
        asked = route(request.method, request.url.path, self._names)
        if asked == "/":
            return as_json(200, self._shown())
        if asked == LIVE:
            return as_json(200, {"state": self._doing})
        if asked == READY:
            self._check_ready()
            return as_json(200, {"state": self._doing})
        if asked == WAY:
            with self._intake.one() as holding:
                name = self._names[0]
                await self._read(request, name, arrival + TIMEOUT_S, holding)
                return as_json(200, None)
        if self._way is not None:
            self._way.passed()
        try:
            with self._intake.one() as holding:
                self._check_there()
                way = self._way.seconds if self._way is not None else 0.0
                self._check_hope(asked, way)
                value = await self._read(request, asked, self._until(arrival), holding)
                status, text = await self._answer(asked, value, arrival, way)
                return Response(text, status, media_type="application/json")
        except Refused as error:
            said = of_server(error, self._setting.slo)
            self._count(asked, said)
            raise said from None
        except Said as said:
            self._count(asked, said)
            raise

    async def _read(self, request: Request, name: str, until: float, holding: Holding) -> Any:
        if name not in self._forms:
            raise self._not_there()
        return await self._intake.read(request, self._forms[name], self._most[name], until, holding)

    async def _call(self, value: Any, name: str) -> Any:
        arrival = time.monotonic()
        if name not in self._names:
            raise ServeError(unknown(name, self._names))
        way = self._way.least if self._way is not None else 0.0
        try:
            self._check_there()
            self._check_hope(name, way)
            trouble = self._forms[name].trouble(value)
            if trouble is not None:
                raise Said(400, "bad_input", trouble)
            status, text = await self._answer(name, value, arrival, way)
        except Refused as error:
            self._count(name, of_server(error, self._setting.slo))
            raise
        except Said as said:
            self._count(name, said)
            raise ServeError(f"{said}; call again" if said.status == 503 else said.text) from None
        if status != 200:
            raise ServeError(json.loads(text)["error"])
        return json.loads(text)

    async def _answer(self, name: str, value: Any, arrival: float, way: float) -> Outcome:
        """Ask a model, and count what it has answered. Raises Refused.

        way: seconds that the request spends on its way here and back.
        """
        assert self._server is not None
        try:
            within = left(self._server, self._models[name], self._setting.slo, way) + arrival - time.monotonic()
            asked = asyncio.wrap_future(self._server.submit(name, value, within))
            status, text = await asyncio.wait_for(asked, self._until(arrival) - time.monotonic())
        except Refused:
            raise
        except asyncio.TimeoutError:
            raise Refused(name, Reason.OVERDUE) from None
        except asyncio.CancelledError:
            self._books.count(name, "cancelled")
            raise
        except Exception as error:
            status, text = 500, json.dumps({"error": str(error), "code": "model_failed"})
        self._books.count(name, "failed" if status != 200 else "answered")
        return status, text

    def _until(self, arrival: float) -> float:
        """When a request that came at ``arrival`` must be told something: no later answer could reach it in time."""
        return arrival + self._setting.slo - (self._way.least if self._way is not None else 0.0)

    def _check_there(self) -> None:
        """Raises `Said` if nothing can be answered whatever the load is. A lost model process may be back in time."""
        if self._ends.is_set():
            raise refused("stopping", "the service is being stopped", closes=True)
        if self._server is None or self._devices is None:
            raise self._not_there()
        if not self._devices.count:
            waits = self._devices.waits or "the models load"
            raise refused("no_lease", f"the service has no device now: {waits}")

    def _not_there(self) -> Said:
        return refused(self._state, f"the models are not there yet: {self._doing}")

    def _check_ready(self) -> None:
        """Raises `Said` if no model process can answer now."""
        self._check_there()
        if self._server is not None and not self._server.able:
            raise refused("no_model_process", "no model process answers")

    def _check_hope(self, name: str, way: float) -> None:
        """Raises Refused for a request that is not even read. To read it costs more than to refuse it."""
        server = self._server
        if server is not None and server.hopeless(name, left(server, self._models[name], self._setting.slo, way)):
            raise Refused(name, Reason.QUEUE_FULL)

    def _count(self, name: str, said: Said) -> None:
        if said.code != "disconnected":
            became = "late" if said.code == "overdue" else f"refused: {said.code}"
            self._books.count(name, became if said.status == 503 else "bad")

    def _shown(self) -> dict[str, Any]:
        trials = [{"trial": one.name, "value": one.value} for one in self._setting.loading.trials]
        return {"state": self._doing, "slo_s": self._setting.slo, "trials": trials}

    @property
    def _doing(self) -> str:
        """What it does now, with what it waits for."""
        waits = self._devices.waits if self._devices is not None else ""
        if not waits and self._server is not None and not self._server.able:
            waits = "waiting for a model process"
        return waits if waits and self._state in ("loading", "serving") else self._state

    # The start, in a thread of its own.

    def _begin(self) -> None:
        if self._setting.modules is not None:
            self._forks = ForkedActors(self._setting.modules, self._setting.loading.environment)
        while not self._ends.is_set():
            try:
                self._load_and_measure()
                return
            except Exception as error:
                if self._devices is not None and self._devices.interrupted():
                    continue
                logger.exception("The models cannot be served")
                self._why = str(error) if isinstance(error, ServeError) else repr(error)
                self._state = "failed"
                self._log.write("serving_failed", reason=self._why)
            if self._devices is not None:
                self._devices.anew()
            self._ends.wait(AGAIN_S)

    def _load_and_measure(self) -> None:
        setting = self._setting
        self._state = "loading"
        held = self._devices = self._devices or self._get_devices()
        found = held.first(self._ends)
        if found is None:
            held.close()
            return
        devices, samples = found
        self._state = "measuring"
        forms = {name: Form.of(some) for name, some in samples.items()}
        self._forms = forms
        self._most = {name: setting.max_body or largest_body(some) for name, some in samples.items()}
        way = Way(setting.url_host, setting.port, json.dumps(samples[self._names[0]][0]), self._ends)
        way.first()
        slos = dict.fromkeys(self._names, setting.slo)
        models = measure_models(
            [device.measured() for device in devices.values()], samples, slos, setting.max_batch, None, setting.policy
        )
        for model in models:
            seconds = model.profile.table[1:-1]
            delays = model.delays.smallest + way.seconds
            check_slo(model.name, model.profile, model.slo, delays)
            self._log.write("model_measured", trial=model.name, seconds=seconds, delays=delays)
        self._models, self._way = {model.name: model for model in models}, way
        served = {one.name: (one.profile, one.budget - way.seconds) for one in models}
        functions = {number: device.functions() for number, device in devices.items()}
        server = ThreadedServer(models, functions, self._books.batch, held.check)
        held.serve(server, lambda: self._watch.wanted if self._watch is not None else 1)
        self._server = server
        way.watch()
        self._note()
        self._keep_profiles()
        scaler = Autoscaler(served)
        self._watch = Watch(self._books, self._log, ServingGauges(), lambda: held.count, scaler, self._note)
        self._watch.start()
        collect_seldom()
        self._state, self._why = "serving", ""

    def _get_devices(self) -> ServedDevices:
        setting = self._setting
        if setting.leasing is None:
            return OwnDevices(setting.devices, self._start_device)
        # Here and not above: a service with devices of its own needs neither Themis nor its solver.
        from fluidtune.serving.model_leases import ModelLeases

        return ModelLeases(setting.leasing, self._start_device, self._log.write)

    def _start_device(self, number: int, group: Any = None) -> RemoteDevice:
        """A process for a device. ``group``: the placement group of its lease, if it is one."""
        options = dict(self._setting.resources)
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        return RemoteDevice(number, self._setting.loading, options, self._log.write, self._forks)

    def _tell_start(self) -> None:
        setting = self._setting
        self._log.write(
            "serving_started",
            run=setting.run,
            ray=ray.__version__,
            fluidtune=fluidtune.__version__,
            python=platform.python_version(),
            machine=this_machine(),
            kind="gpu" if setting.resources.get("num_gpus") else "cpu",
            devices=setting.devices,
            slo=setting.slo,
            starts=setting.policy.value,
            trials=[{"trial": one.name, "value": one.value} for one in setting.loading.trials],
        )

    def _note(self) -> None:
        """Take down the profiles as they are known now. It is called when there is no overload."""
        if self._server is not None:
            known, delays = {name: self._server.profile(name) for name in self._names}, self._delays()
            if all(known[name].seconds(1) + delays[name] <= self._setting.slo for name in self._names):
                self._kept = profiles_to_json(known, this_machine(), delays)

    def _keep_profiles(self) -> None:
        """Write the profiles that were taken down, for `fluidtune serve plan`."""
        if self._kept:
            self._log.keep(PROFILES, self._kept)

    def _delays(self) -> dict[str, float]:
        """By trial, the seconds that an answer takes besides its batch."""
        way = self._way.seconds if self._way is not None else 0.0
        return {name: model.delays.smallest + way for name, model in self._models.items()}


def left(server: ThreadedServer, model: Model, slo: float, way: float) -> float:
    """Seconds of the SLO that are left for the server after the way."""
    after = slo - way
    if server.unanswered == 0 and after < server.profile(model.name).seconds(1) + model.delays.smallest:
        # Else nothing would ever tell that batches of 1 have become shorter again.
        return slo
    return after
