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
from fluidtune.report import this_machine
from fluidtune.serving.books import MINUTE_S, Books
from fluidtune.serving.capacity import DIRECTORY, PROFILES
from fluidtune.serving.model_process import Loading, Outcome
from fluidtune.serving.remote_devices import RemoteDevice
from fluidtune.serving.served_devices import OwnDevices, ServedDevices
from fluidtune.serving.watching import ServingGauges, ServingLog, Watch
from fluidtune.serving.way import PATH as WAY
from fluidtune.serving.way import Way
from symphony_serve.autoscale import Autoscaler
from symphony_serve.batching.start_times import StartPolicy
from symphony_serve.errors import Refused, ServeError
from symphony_serve.forms import Form
from symphony_serve.kept_profiles import profiles_to_json
from symphony_serve.messages import Reason
from symphony_serve.model_side import Model
from symphony_serve.profiles import check_slo
from symphony_serve.shell.measuring import measure_models
from symphony_serve.shell.threaded_server import ThreadedServer

if TYPE_CHECKING:
    from fluidtune.serving.model_leases import Leasing

logger = logging.getLogger(__name__)

#: Seconds between two attempts to begin. Judgement: nobody is served then.
AGAIN_S = 5.0
#: Requests that are being read or wait for their answer. Judgement: far more than a front answers within any SLO; each
#: holds its input, so without a limit a flood under a long SLO ends the process for want of memory.
MOST_OPEN = 10_000


@dataclass(frozen=True)
class Setting:
    """What is served, and how.

    run: the directory of the run. resources: Ray's options for a model process. devices: how many there are; 0: they
    are leases. leasing: how these are leased. max_body: bytes of a request's body. url_host, port: where the front door
    is reached from this node.
    """

    run: str
    loading: Loading
    slo: float
    resources: dict[str, float]
    devices: int
    max_batch: int
    max_body: int
    policy: StartPolicy
    url_host: str
    port: int
    leasing: Leasing | None = None


class Front:
    """Answers HTTP requests: ``POST /`` asks the best trial, ``POST /TRIAL`` another one, ``GET /`` says what there is.

    The body of a request is one input as a JSON value, that of an answer one output. 400: the input is none. 404: no
    such trial. 413: the body is too large. 500: the model has failed with this input. 503: refused, with the reason.

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
        self._forms: dict[str, Form] = {}
        self._devices: ServedDevices | None = None
        self._way: Way | None = None
        #: Requests that are being read or wait for their answer.
        self._asked = 0
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
        if asked.method == "GET" and asked.url.path == "/":
            return _json(200, self._shown())
        if asked.method != "POST":
            return _json(405, {"error": f"{asked.method} {asked.url.path} is not served; POST an input, or GET /"})
        own = asked.url.path == WAY
        if not own and self._way is not None:
            self._way.passed()
        name = asked.url.path.strip("/") or self._names[0]
        if not own and name not in self._names:
            return _json(404, {"error": self._unknown(name)})
        if self._asked >= MOST_OPEN:
            self._books.count(name, "refused: too_many")
            return _json(503, {"error": "refused", "reason": f"{MOST_OPEN} requests are open already"})
        way = self._way.seconds if self._way is not None else 0.0
        if not own and self._hopeless(name, way):
            return _json(503, {"error": "refused", "reason": Reason.QUEUE_FULL.value})
        self._asked += 1
        try:
            return await self._read_and_answer(asked, name, time.monotonic(), way)
        finally:
            self._asked -= 1

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
        self._ends.set()
        if self._server is not None:
            self._server.close(timeout=1.0)
            self._keep_profiles()
        if self._devices is not None:
            self._devices.close()
        if self._watch is not None:
            self._watch.stop()
        self._log.write("serving_ended", seconds=time.monotonic() - self._began)
        self._log.close()

    # One request.

    async def _read_and_answer(self, request: Request, name: str, arrival: float, way: float) -> Response:
        try:
            value = json.loads(await _body(request, self._setting.max_body), parse_constant=_no_number)
        except _TooLarge as error:
            return self._bad(name, str(error), 413)
        except (ValueError, RecursionError) as error:
            return self._bad(name, f"the body is no JSON value: {error}")
        if request.url.path == WAY:
            return _json(200, None)
        try:
            status, text = await self._answer(name, value, arrival, way)
        except _NotThere as error:
            return _json(503, {"error": "refused", "reason": str(error)})
        except Refused as refused:
            return _json(503, {"error": "refused", "reason": refused.reason.value})
        except ServeError as error:
            return _json(400, {"error": str(error)})
        return Response(text, status, media_type="application/json")

    async def _call(self, value: Any, name: str) -> Any:
        """Answer a handle's call."""
        arrival = time.monotonic()
        if name not in self._names:
            raise ServeError(self._unknown(name))
        way = self._way.least if self._way is not None else 0.0
        if self._hopeless(name, way):
            raise Refused(name, Reason.QUEUE_FULL)
        try:
            status, text = await self._answer(name, value, arrival, way)
        except _NotThere as error:
            raise ServeError(f"{error}; call again") from None
        if status != 200:
            raise ServeError(json.loads(text)["error"])
        return json.loads(text)

    def _unknown(self, name: str) -> str:
        return f"no trial {name!r} is served; there are {', '.join(self._names)}"

    async def _answer(self, name: str, value: Any, arrival: float, way: float) -> Outcome:
        """Ask a model, and count what became of it. Raises Refused, `_NotThere`, and ServeError for a bad input.

        way: seconds that the request spends on its way here and back.
        """
        if self._server is None or self._devices is None:
            self._books.count(name, f"refused: {self._state}")
            raise _NotThere(f"the models are not there yet: {self._doing}")
        if not self._devices.count:
            self._books.count(name, "refused: no_lease")
            raise _NotThere(f"the service has no device now: {self._devices.waits or 'the models load'}")
        trouble = self._forms[name].trouble(value)
        if trouble is not None:
            self._books.count(name, "bad")
            raise ServeError(trouble)
        try:
            within = left(self._server, self._models[name], self._setting.slo, way)
            status, text = await asyncio.wrap_future(self._server.submit(name, value, within))
        except Refused as refused:
            self._books.count(name, f"refused: {refused.reason.name.lower()}")
            raise
        except asyncio.CancelledError:
            self._books.count(name, "cancelled")
            raise
        except Exception as error:
            status, text = 500, json.dumps({"error": str(error)})
        late = time.monotonic() - arrival > self._setting.slo
        self._books.count(name, "failed" if status != 200 else "late" if late else "answered")
        return status, text

    def _hopeless(self, name: str, way: float) -> bool:
        """Whether a request is refused, and counted so, before it is read. To read it costs more than to refuse it."""
        server = self._server
        if server is None or not server.hopeless(name, left(server, self._models[name], self._setting.slo, way)):
            return False
        self._books.count(name, "refused: queue_full")
        return True

    def _bad(self, name: str, said: str, status: int = 400) -> Response:
        self._books.count(name, "bad")
        return _json(status, {"error": said})

    def _shown(self) -> dict[str, Any]:
        trials = [{"trial": one.name, "value": one.value} for one in self._setting.loading.trials]
        return {"state": self._doing, "slo_s": self._setting.slo, "trials": trials}

    @property
    def _doing(self) -> str:
        """What it does now, with what it waits for."""
        waits = self._devices.waits if self._devices is not None else ""
        return waits if waits and self._state in ("loading", "serving") else self._state

    # The start, in a thread of its own.

    def _begin(self) -> None:
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
        self._forms, self._models, self._way = forms, {model.name: model for model in models}, way
        served = {one.name: (one.profile, one.budget - way.seconds) for one in models}
        functions = {number: device.functions() for number, device in devices.items()}
        server = ThreadedServer(models, functions, self._books.batch)
        held.serve(server, lambda: self._watch.wanted if self._watch is not None else 1)
        self._server = server
        way.watch()
        self._keep_profiles()
        self._watch = Watch(self._books, self._log, ServingGauges(), lambda: held.count, Autoscaler(served))
        self._watch.start()
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
        return RemoteDevice(number, self._setting.loading, options, self._log.write)

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
            starts=setting.policy.name,
            trials=[{"trial": one.name, "value": one.value} for one in setting.loading.trials],
        )

    def _keep_profiles(self) -> None:
        """Write the profiles as they are known now, for `fluidtune serve plan`."""
        if self._server is not None:
            known = {name: self._server.profile(name) for name in self._names}
            self._log.keep(PROFILES, profiles_to_json(known, this_machine(), self._delays()))

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


class _NotThere(Exception):
    """Nothing is loaded and measured yet, or there is no device."""


class _TooLarge(Exception):
    """A body has more bytes than are read."""


async def _body(request: Request, most: int) -> bytes:
    """The body, if it has ``most`` bytes or fewer. Of one that says that it has more, nothing is read."""
    said = request.headers.get("content-length", "")
    read = bytearray()
    if not (said.isdecimal() and int(said) > most):
        async for chunk in request.stream():
            read += chunk
            if len(read) > most:
                break
        else:
            return bytes(read)
    raise _TooLarge(f"the body has more than {most} bytes; send less, or serve with a larger max_body")


def _json(status: int, value: Any) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")
