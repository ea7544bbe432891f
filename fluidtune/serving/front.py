"""The front: reads requests, asks the scheduler, and answers them, all on one event loop.

A task starts the devices, measures them, and then starts the server. Until then each request is refused. All times are
seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import os
import platform
import time
import uuid
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import ray
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import fluidtune
from fluidtune.cluster.forks.forked import ForkedActors
from fluidtune.report import this_machine
from fluidtune.serving.address import url_of
from fluidtune.serving.answers import (
    AGAIN_S,
    LIVE,
    METRICS,
    READY,
    Route,
    Said,
    as_json,
    bad,
    in_protocol,
    inference,
    of_server,
    refused,
    route,
)
from fluidtune.serving.capacity import PROFILES
from fluidtune.serving.device import Device
from fluidtune.serving.following import follow
from fluidtune.serving.inference_protocol import Asked, Interface, server_metadata
from fluidtune.serving.intake import Holding, Intake, collect_seldom
from fluidtune.serving.loaded_model import failed
from fluidtune.serving.model_process import Loading
from fluidtune.serving.model_versions import labels
from fluidtune.serving.openapi import DOCUMENT, PAGE, document, page
from fluidtune.serving.placed_devices import PlacedDevices
from fluidtune.serving.process import Process, said_of
from fluidtune.serving.rollouts import Answering, Rollouts
from fluidtune.serving.service_devices import Devices, OwnDevices
from fluidtune.serving.setting import Setting
from fluidtune.serving.stage_group import StageGroup
from fluidtune.serving.watching import MINUTE_S, Books, ServingGauges, ServingLog, Watch, demand, exposition
from fluidtune.serving.wire import MODEL_VERSION, REQUEST_ID, SOURCE, TIMEOUT, timeout_s
from symphony_serve.autoscale import Autoscaler
from symphony_serve.errors import Refused, ServeError
from symphony_serve.messages import MAY_HAVE_RUN, Reason
from symphony_serve.model_side import TRIED
from symphony_serve.profiles import profiles_to_json
from symphony_serve.reading import PIECE, value_of
from symphony_serve.shell.async_server import Answer, AsyncServer
from symphony_serve.shell.measuring import measure_models

logger = logging.getLogger(__name__)

#: Seconds that a stop waits for what runs. A batch that takes longer is late anyhow.
STOP_S = 1.0
#: A body for which the front has waited longer than this part of the SLO came slowly. Source: the part of the SLO that
#: the times of a model's batches leave for all that is before a decision.
SLOW = 1 - TRIED
#: Characters of a request's id and of its source that are kept, and inputs of one request. Judgement: an id of any
#: tracer, and several of the largest batches.
MOST_ID, MOST_INPUTS = 128, 1024
#: Inputs of one request that are a piece (`intake.Turns`). Source: `AsyncServer.ask` takes 15 to 30 us on a core of an
#: AMD EPYC.
ASKED = 64


class Front:
    """An ASGI application, and what is asked about it. It belongs to the event loop that runs when it is made.

    `answers` has the paths and what is said at them. The body of a request is one input as a JSON value, that of an
    answer one output. All other answers are `Said`, a refusal at the SLO at the latest.
    """

    def __init__(self, setting: Setting):
        self._setting = setting
        self._names = [trial.name for trial in setting.loading.trials]
        #: What it does now, in one word, and in the state "failed" why.
        self._state, self._why = "loading", ""
        self._server: AsyncServer | None = None
        #: By path, the OpenAPI document of all, and its page.
        self._document: dict[str, bytes] = {}
        self._devices: Devices | None = None
        self._forks: ForkedActors | None = None
        self._intake = Intake(setting.slo)
        #: What is kept for `fluidtune serve plan`: profiles and delays of a time without overload.
        self._kept = ""
        self._log = ServingLog(Path(setting.folder))
        #: The versions, about which operators ask.
        self.rollouts = Rollouts(setting, self._log.write)
        self._books = Books(self.rollouts.keys)
        self._watch: Watch | None = None
        self._following: asyncio.Task[None] | None = None
        self._stopping = False
        self._began = time.monotonic()
        self._tell_start()
        self._beginning = asyncio.get_running_loop().create_task(self._begin(), name="serve-begin")

    # A request, from its head to its answer.

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one HTTP request."""
        arrival = time.monotonic()
        request = Request(scope, receive)
        number = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
        try:
            self._check_token(request)
            response = await self._respond(request, arrival, number)
        except Said as said:
            response = said.response(in_protocol(scope["path"]))
        response.headers[REQUEST_ID] = number[:MOST_ID]
        await response(scope, receive, send)

    async def _respond(self, request: Request, arrival: float, number: str) -> Response:
        """Raises `Said`."""
        path = request.scope["path"]
        asked = inference(request.method, path, self._versions()) if in_protocol(path) else None
        if self._setting.placing is not None and len(self._names) > 1 and (request.method, path) == ("POST", "/"):
            raise Said(404, "not_found", f"several models are served; POST /MODEL: {', '.join(self._names)}")
        name = asked.model if asked is not None else route(request.method, path, self._names)
        if request.method != "POST":
            return self._shown(name, asked)
        version = asked.version if asked is not None else ""
        key = self._key(name, version, number)
        until, holding = arrival + self._setting.slo_of(name), Holding()
        try:
            until = arrival + timeout_s(request.headers.get(TIMEOUT), self._setting.slo_of(name))
            with self._intake.one(holding):
                server = self._check_there()
                self._check_loaded(name)
                if (why := server.hopeless(key, until - arrival)) is not None:
                    raise Refused(name, why)  # To read it costs more than to refuse it.
                about = self.rollouts.answering[key]
                if asked is None:
                    value = await self._intake.read(request, about.interface.form, about.most, until, holding)
                    key = self._key(name, version, number)  # It may be another one by now. All have one form.
                    ((status, text),) = outcomes = await self._ask(server, request, key, [value], until)
                    self._became(key, outcomes, arrival)
                    if status != 200:
                        logger.warning("Request %s: %s", number[:MOST_ID], text)
                    response = Response(text, status, media_type="application/json")
                else:
                    body = await self._intake.read_tensors(request, about.most, until, holding)
                    batch, until = await self._decoded(about, request, body, until)
                    self._intake.hold_inputs(holding, len(batch.inputs))
                    key = self._key(name, version, number)
                    response = await self._infer(server, request, key, asked, batch, arrival, until)
                response.headers[MODEL_VERSION] = labels(key)[1]
                return response
        except (Refused, ServeError, Said) as error:
            said = error if isinstance(error, Said) else self._said(error, key)
            self._count(key, said, self._hurried(name, arrival, until, holding), holding.inputs)
            raise said from None

    def _said(self, error: Refused | ServeError, key: str) -> Said:
        """The answer to a request that is refused, or that is none."""
        if not isinstance(error, Refused):
            return bad(error)
        unsent = isinstance(self._devices, PlacedDevices) and error.reason not in MAY_HAVE_RUN | {Reason.CLOSED}
        if unsent and (comes_in := self._devices.comes_in(key)) is not None:  # type: ignore[union-attr]
            return refused("loading", f"model {key} is not in memory; to load it takes {comes_in:.1f} s", comes_in)
        there = self._server is not None and key in self.rollouts.answering
        return of_server(error, self._server.wait(key) if there else self._setting.slo)  # type: ignore[union-attr]

    def _key(self, name: str, version: str, number: str) -> str:
        """Of the model and version that answer the request with this id. version: that it names; "": none.

        Raises `Said` if there is no such version any more.
        """
        service = self.rollouts.service
        if name != self._names[0]:
            return name
        if not version:
            able = service.phase != "canary" or self._server.able_for(service.known[1].key)  # type: ignore[union-attr]
            return service.drawn(number, able).key
        if version not in service.answering:
            raise Said(404, "not_found", f"version {version} of {name} is not there any more")
        return service.answering[version].key

    def _versions(self) -> dict[str, tuple[str, ...]]:
        """Of each model, the versions that a request may name."""
        found: dict[str, tuple[str, ...]] = dict.fromkeys(self._names, ("1",))
        return {**found, self._names[0]: tuple(self.rollouts.service.answering)}

    async def _decoded(self, about: Answering, request: Request, body: bytes, until: float) -> tuple[Asked, float]:
        """The batch in a body of tensors, and until when its answer is wanted. Raises ServeError."""
        decode = functools.partial(about.interface.decode, request.headers, body, MOST_INPUTS)
        # A large one in a thread: what checks it is Python, which lets the loop go on meanwhile.
        batch = decode() if len(body) <= PIECE else await asyncio.to_thread(decode)
        if batch.timeout_s is not None:
            until = min(until, time.monotonic() + batch.timeout_s)
        return batch, until

    async def _infer(
        self,
        server: AsyncServer,
        request: Request,
        key: str,
        asked: Route,
        batch: Asked,
        arrival: float,
        until: float,
    ) -> Response:
        """The answer to a batch of inputs as tensors. Raises `Said`, ServeError and Refused."""
        interface = self.rollouts.answering[key].interface
        interface.check_outputs(batch.outputs)  # The version that has read the request may have been another one.
        outcomes = await self._ask(server, request, key, batch.inputs, until)
        response = None
        if all(status == 200 for status, _ in outcomes):
            try:
                response = Response(*await self._encoded(interface, batch, asked.model, labels(key)[1], outcomes))
            except ServeError as error:
                outcomes = [_failed(error)] * len(outcomes)
        self._became(key, outcomes, arrival)
        if response is not None:
            return response
        status, text = next(outcome for outcome in outcomes if outcome[0] != 200)
        return Response(text, status, media_type="application/json")

    async def _encoded(
        self, interface: Interface, batch: Asked, model: str, version: str, outcomes: Sequence[tuple[int, str]]
    ) -> tuple[bytes, int, dict[str, str]]:
        """Body, status and headers of the answer with these outputs. Raises ServeError if they are not as declared."""

        def encode() -> tuple[bytes, int, dict[str, str]]:
            answer, headers = interface.encode(batch, model, version, [value_of(text) for _, text in outcomes])
            return answer, 200, headers

        # Large ones in a thread, as in `_decoded`.
        size = sum(len(text) for _, text in outcomes)
        return encode() if size <= PIECE else await asyncio.to_thread(encode)

    async def _ask(
        self, server: AsyncServer, request: Request, name: str, values: Sequence[Any], until: float
    ) -> list[tuple[int, str]]:
        """The status and the text of each answer of the model ``name`` of the server. Raises `Said` and Refused."""
        source = request.headers.get(SOURCE, "")[:MOST_ID]
        if isinstance(self._devices, PlacedDevices):
            self._devices.asked[name] += len(values)
        answers: list[Answer] = []
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request))
        try:
            if len(values) == 1:
                answers.append(server.ask(name, values[0], until - time.monotonic(), source))
            else:
                asking = self._ask_many(server, name, values, until, source, answers, gone)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asking, until - time.monotonic())
            left: set[asyncio.Future[Any]] = set(answers)
            while left and not gone.done() and (wait_s := until - time.monotonic()) > 0:
                done, left = await asyncio.wait({*left, gone}, timeout=wait_s, return_when=FIRST_COMPLETED)
                left -= {gone}
                if any(_refusal(one) for one in done - {gone}):
                    break
            told = [one for one in answers if one.done()]
        finally:
            gone.cancel()
            await self._cancel(answers)
        why = next(filter(None, map(_refusal, told)), None)
        if why is None and len(told) == len(values):
            return [_outcome(one) for one in told]
        if why is None and gone.done() and not gone.cancelled():
            self._books.count(name, "cancelled", len(values))
            raise Said(400, "disconnected", "the client has gone")
        raise why or Refused(name, _too_late(answers, len(values)))

    async def _ask_many(
        self,
        server: AsyncServer,
        name: str,
        values: Sequence[Any],
        until: float,
        source: str,
        answers: list[Answer],
        gone: asyncio.Future[Any],
    ) -> None:
        """Ask for several inputs, as long as they can be answered and the client is there. Raises Refused.

        answers: get an answer for each that was asked for.
        """
        for at in range(0, len(values), ASKED):
            some = values[at : at + ASKED]
            async with self._intake.inputs.one(len(some) / ASKED):
                within = until - time.monotonic()
                if not at and (why := server.hopeless(name, within, len(values))) is not None:
                    raise Refused(name, why)
                if within <= 0 or gone.done() or any(map(_refusal, answers)):
                    return
                answers += [server.ask(name, value, until - time.monotonic(), source) for value in some]

    async def _cancel(self, answers: Sequence[Answer]) -> None:
        """Nobody wants those that are not there yet: take them out of their queues, in pieces as in `_ask_many`."""
        left = [one for one in answers if not one.done()]
        try:
            while len(left) > ASKED:
                async with self._intake.inputs.one():
                    for _ in range(ASKED):
                        left.pop().cancel()
        finally:
            for one in left:
                one.cancel()

    def _became(self, name: str, outcomes: Sequence[tuple[int, str]], arrival: float) -> None:
        """Count a request's outcomes, as they are sent."""
        for status, _ in outcomes:
            if status == 200:
                self._books.answered(name, time.monotonic() - arrival)
            else:
                self._books.count(name, "bad" if status == 400 else "failed")

    def _check_there(self) -> AsyncServer:
        """Raises `Said` if nothing can be answered whatever the load is. A lost model process may be back in time."""
        if self._stopping:
            raise refused("stopping", "the service is being stopped", closes=True)
        if self._server is None or self._devices is None:
            raise refused(self._state, f"the models are not there yet: {self._doing}")
        if not self._devices.count:
            waits = self._devices.waits or "the models load"
            raise refused("no_lease", f"the service has no device now: {waits}")
        return self._server

    def _check_loaded(self, name: str) -> None:
        """Raises `Said` for one of several models that no device could load."""
        if isinstance(self._devices, PlacedDevices) and (why := self._devices.unavailable.get(name)):
            raise refused("no_model_process", f"model {name} is not loaded: {why}")

    def _check_ready(self, asked: Route | None) -> None:
        """Raises `Said` if no model process can answer now. asked: about a model, and maybe a version of it."""
        server, service = self._check_there(), self.rollouts.service
        model, version = (asked.model, asked.version) if asked is not None else ("", "")
        self._check_loaded(model)
        key = service.answering.get(version, service.serving).key if model == self._names[0] else model
        comes_when_asked = isinstance(self._devices, PlacedDevices) and model and self._devices.comes(model)
        if not comes_when_asked and not self._is_able(server, key):
            raise refused("no_model_process", "no model process answers")

    def _is_able(self, server: AsyncServer, key: str = "") -> bool:
        """Whether a device can answer now for this model; "": for the one that ``POST /`` asks, or any of several."""
        if self._setting.placing is None:
            key = key or self.rollouts.service.serving.key
        return server.able_for(key) if key else bool(server.able)

    def _hurried(self, name: str, arrival: float, until: float, holding: Holding) -> bool:
        """Whether the client left less than the SLO: it wanted its answer sooner, or its body came slowly."""
        slo = self._setting.slo_of(name)
        return until < arrival + slo or holding.waited > SLOW * slo

    def _count(self, name: str, said: Said, hurried: bool, times: int) -> None:
        """hurried: as `_hurried`."""
        if said.code != "disconnected":
            became = "late" if said.code == "overdue" else f"refused: {said.code}"
            self._books.count(name, became if said.status == 503 else "bad", times, hurried)

    def _shown(self, name: str, asked: Route | None) -> Response:
        """What needs no model: a state, a description, or counts. Raises `Said`."""
        what = asked.what if asked is not None else name
        if what in (READY, "ready", "model_ready"):
            self._check_ready(asked)
        if what in (LIVE, READY, "live", "ready"):
            return as_json(200, {"live" if what in (LIVE, "live") else "ready": True, "state": self._doing})
        if what == "model_ready":
            return as_json(200, {"name": name, "ready": True, "state": self._doing})
        if what == METRICS:
            return Response(exposition(self._books), media_type=CONTENT_TYPE_LATEST)
        if what == "server":
            return as_json(200, server_metadata())
        if what == "/":
            versions = self._versions()
            trials = [
                {"trial": one.name, "value": one.value, "versions": versions[one.name], **self._own_slo(one.name)}
                for one in self._setting.loading.trials
            ]
            return as_json(200, {"state": self._doing, "slo_s": self._setting.slo, "trials": trials})
        if not self._document:
            raise refused(self._state, f"the models are not there yet: {self._doing}")
        if what == "model":
            assert asked is not None
            about = self.rollouts.answering[self._key(name, asked.version, "")]
            return as_json(200, about.interface.metadata(name, self._versions()[name]))
        return Response(self._document[what], media_type="application/json" if what == DOCUMENT else "text/html")

    def _own_slo(self, name: str) -> dict[str, float]:
        """The SLO of one of several models, which have each their own."""
        return {"slo_s": self._setting.slo_of(name)} if self._setting.placing is not None else {}

    def _check_token(self, request: Request) -> None:
        """Raises `Said` for a request without the service's token. Probes need none."""
        token = self._setting.token
        if token is None or request.scope["path"] in (LIVE, READY, "/v2/health/live", "/v2/health/ready"):
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            said = "the bearer token is missing or wrong; send the header Authorization: Bearer TOKEN"
            raise Said(401, "unauthorized", said, headers={"WWW-Authenticate": "Bearer"})

    @property
    def _doing(self) -> str:
        """What it does now, with what it waits for."""
        waits = self._devices.waits if self._devices is not None else ""
        if not waits and self._server is not None and not self._is_able(self._server):
            waits = "waiting for a model process"
        return waits if waits and self._state in ("loading", "serving") else self._state

    # What `fluidtune serve` asks.

    async def stop(self) -> None:
        """Refuse whatever comes from now on. Returns when what runs is answered, or after `STOP_S`, and all is kept."""
        self._stopping = True
        self._beginning.cancel()
        if self._following is not None:
            self._following.cancel()
        await asyncio.wait([self._beginning])
        if self._server is not None:
            await self._server.close(STOP_S)
        until = time.monotonic() + STOP_S
        while self._intake.open and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self._state = "ended"
        await self.rollouts.close()
        if self._server is not None:
            self._keep_profiles()
        if self._devices is not None:
            await self._devices.close()
        if self._watch is not None:
            self._watch.stop()
        self._log.write("serving_ended", seconds=time.monotonic() - self._began)
        self._log.close()

    def status(self) -> dict[str, Any]:
        """What is served, and what has become of the requests."""
        pids, wanted = self._devices.processes if self._devices is not None else ([], 0)
        others = [
            {"trial": one.name, "version": 1, "state": "serving", "value": one.value, **self._figures(one.name)}
            for one in self._setting.loading.trials[1:]
        ]
        return {
            "name": self._setting.known.name,
            "user": self._setting.known.user,
            "url": url_of(self._setting.host, self._setting.port, ray.util.get_node_ip_address()),
            "state": self._doing,
            "why": self._why,
            "slo_s": self._setting.slo,
            "delays_s": next(iter(self._delays().values()), None),
            "seconds": time.monotonic() - self._began,
            "devices": self._devices.count if self._devices and self._server else self._setting.devices,
            "devices_wanted": self._watch.wanted if self._watch is not None else None,
            "app": self._setting.leasing.app if self._setting.leasing is not None else None,
            "log": str(self._log.directory) if self._log.directory is not None else None,
            "pid": os.getpid(),
            "device_pids": pids,
            "processes_wanted": wanted * self._setting.stages,
            "unanswered": self._server.unanswered if self._server is not None else 0,
            "model": self._names[0],
            "phase": self.rollouts.service.phase,
            "stages": self.rollouts.stages(),
            "placement": self._devices.placement() if isinstance(self._devices, PlacedDevices) else None,
            "trials": [*self.rollouts.status(self._figures), *others],
        }

    def _figures(self, key: str) -> dict[str, Any]:
        """What has become of the requests to a version, and how it answers."""
        there = self._server is not None and self._server.serves(key)
        goodput, p99 = self._books.pace(key)
        batches = self._books.total().batches.get(key, dict[int, int]())
        return {
            **self._own_slo(key),
            "batching": self._server.batching(key) if there else None,  # type: ignore[union-attr]
            "batch_1_s": self._server.profile(key).seconds(1) if there else None,  # type: ignore[union-attr]
            "requests": self._books.requests(key),
            "goodput": goodput,
            "p99_s": p99,
            "batches": {str(size): count for size, count in sorted(batches.items())},
        }

    def minute(self) -> list[tuple[int, str, int, float, float]]:
        """The batches of the last minute: device, trial, size, seconds from the minute's begin, seconds."""
        begin = time.monotonic() - MINUTE_S
        return [(one.device, one.model, one.size, one.sent - begin, one.seconds) for one in self._books.minute()]

    @property
    def trouble(self) -> str:
        """Why it can answer nothing any more, so that another front must be started; "" if nothing is wrong."""
        if self._server is None or self._devices is None or self._stopping:
            return ""
        return "the server was closed by an error" if self._server.closed else self._devices.trouble

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
                    if self._devices is not None and await self._devices.interrupted():
                        continue
                    self._fail(error)
                    await self._clear()
                except Exception as another:
                    self._fail(another)
            await asyncio.sleep(AGAIN_S)

    def _fail(self, error: Exception) -> None:
        logger.error("The models cannot be served", exc_info=error)
        self._why = str(error) if isinstance(error, ServeError) else repr(error)
        self._state = "failed"
        self._log.write("serving_failed", reason=self._why)

    async def _clear(self) -> None:
        """Let go what an attempt that failed has left."""
        if self._devices is not None and self._devices.trouble:
            await self._devices.close()
            self._devices = None
        elif self._devices is not None:
            self._devices.anew()

    async def _prepare(self) -> None:
        """Start the servers of forks, and go on with the versions that were served before a restart."""
        if self._setting.modules is not None and self._forks is None:
            self._forks = await asyncio.to_thread(
                ForkedActors, self._setting.modules, self._setting.loading.environment
            )
        await self.rollouts.restore()
        if self.rollouts.keys[0] != self._names[0]:  # The first version, which is counted from the beginning.
            self._books.forget(self._names[0])
            self._books.add(self.rollouts.keys[0])

    async def _load_and_measure(self) -> None:
        setting = self._setting
        self._state = "loading"
        held = self._devices = self._devices or await self._get_devices()
        devices, samples, profiles = await held.first()
        self._state = "measuring"
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
        self._document = {DOCUMENT: json.dumps(about).encode(), PAGE: page(about).encode()}
        self.rollouts.answering.update(found)
        have = {number: device.models for number, device in devices.items()}
        self._server = AsyncServer(models, devices, self._books.batch, have)
        held.serve(self._server, lambda: self._watch.wanted if self._watch is not None else 1)
        self._note()
        self._keep_profiles()
        scaler = Autoscaler({one.name: (one.profile, one.budget) for one in models})
        gauges = ServingGauges(setting.known.name)
        self._watch = Watch(self._books, self._log, gauges, lambda: held.count, scaler, self._note)
        self._watch.start()
        self.rollouts.begin(self._server, self._watch, held)
        if setting.following is not None:
            following = follow(self.rollouts, setting.run, setting.following)
            self._following = asyncio.create_task(following, name="serve-follow")
        collect_seldom()
        self._state, self._why = "serving", ""

    async def _get_devices(self) -> Devices:
        setting = self._setting
        own = OwnDevices(setting.devices, setting.resources, setting.stages)
        if setting.placing is not None:
            return PlacedDevices(setting, own, self._start_device, self._log.write, self._offered)
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
            return Process(*given) if stages == 1 else StageGroup(stages, setting.room, *given)

        # The server keeps to the profile, which has at most twice as many batches in the stages.
        return Device(make, 1 if stages == 1 else 2 * stages)

    def _offered(self) -> dict[str, int]:
        """As `watching.demand`, of all so far."""
        return demand(self._books.total())

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
            known, delays = {name: self._server.profile(name) for name in self.rollouts.keys}, self._delays()
            if all(known[name].seconds(1) + delays[name] <= self._setting.slo_of(name) for name in known):
                self._kept = profiles_to_json(known, this_machine(), delays)

    def _keep_profiles(self) -> None:
        """Write the profiles that were taken down, for `fluidtune serve plan`."""
        if self._kept:
            self._log.keep(PROFILES, self._kept)

    def _delays(self) -> dict[str, float]:
        """By key, the seconds that an answer takes besides its batch."""
        return {key: one.model.delays.margin for key, one in self.rollouts.answering.items()}


def _outcome(answer: asyncio.Future[tuple[int, str]]) -> tuple[int, str]:
    """The status and the text of an answer that is there."""
    error = answer.exception()
    return answer.result() if error is None else _failed(error)


def _failed(error: BaseException) -> tuple[int, str]:
    """What Ray hands on of an error has its traceback behind it."""
    return failed(ServeError(said_of(error)))


def _refusal(answer: asyncio.Future[Any]) -> Refused | None:
    """Why it was refused, if it was."""
    error = answer.exception() if answer.done() and not answer.cancelled() else None
    return error if isinstance(error, Refused) else None


def _too_late(answers: Sequence[Answer], count: int) -> Reason:
    """Why ``count`` inputs have no answer at their deadline. answers: to those that were asked for; none is refused."""
    if not answers:
        return Reason.LATE_ON_ARRIVAL
    return Reason.OVERDUE if len(answers) == count or any(one.sent for one in answers) else Reason.LATE


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone. The body of its request is read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
