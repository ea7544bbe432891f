"""The front: a request's way from its head to its answer, on one event loop.

A request is read, asked of the scheduler, and answered, or refused at its SLO at the latest. Until the service serves,
each request is refused. All times are seconds.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from asyncio import FIRST_COMPLETED, FIRST_EXCEPTION
from collections.abc import Sequence
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from fluidtune.serving.answers import HTTPError, Route, as_json, in_protocol, is_probe, refused, route
from fluidtune.serving.inference_protocol import Asked, Interface, server_metadata
from fluidtune.serving.intake import MOST_TENSORS, Holding
from fluidtune.serving.loaded_model import failed
from fluidtune.serving.model_versions import labels
from fluidtune.serving.plain_input import PlainInput
from fluidtune.serving.process import said_of
from fluidtune.serving.service_controller import ServiceController
from fluidtune.serving.setting import Setting
from fluidtune.serving.watching import exposition
from fluidtune.serving.wire import MODEL_VERSION, REQUEST_ID, SOURCE, TIMEOUT, timeout_s
from symphony_serve.errors import Refused, ServeError
from symphony_serve.messages import MAY_HAVE_RUN, Reason
from symphony_serve.model_side import TRIED
from symphony_serve.shell.async_server import Answer, AsyncServer

logger = logging.getLogger(__name__)

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
    """An ASGI application that asks the models of a service.

    `answers` has the paths and what is said at them. The body of a request is one input as a JSON value (`PlainInput`),
    or a batch of tensors (`Interface`). All answers but outputs are `HTTPError`.
    """

    def __init__(self, setting: Setting, controller: ServiceController):
        self._setting, self._controller = setting, controller
        self._rollouts, self._intake, self._books = controller.rollouts, controller.intake, controller.books
        self._names = [trial.name for trial in setting.loading.trials]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one HTTP request."""
        arrival = time.monotonic()
        request = Request(scope, receive)
        request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
        try:
            self._check_token(request)
            response = await self._respond(request, arrival, request_id)
        except HTTPError as said:
            response = said.response(in_protocol(scope["path"]))
        response.headers[REQUEST_ID] = request_id[:MOST_ID]
        await response(scope, receive, send)

    async def _respond(self, request: Request, arrival: float, request_id: str) -> Response:
        """Raises `HTTPError`."""
        path = request.scope["path"]
        if self._setting.placing is not None and len(self._names) > 1 and (request.method, path) == ("POST", "/"):
            raise HTTPError(404, "not_found", f"several models are served; POST /MODEL: {', '.join(self._names)}")
        asked = route(request.method, path, self._version_names())
        if request.method != "POST":
            return self._shown(asked)
        slo, tensors = self._setting.slo_of(asked.model), asked.what == "infer"
        key = self._key(asked, request_id)
        holding = Holding(arrival + slo)
        try:
            holding.until = arrival + timeout_s(request.headers.get(TIMEOUT), slo)
            with self._intake.one(holding):
                server = self._controller.server_for(asked.model)
                if (why := server.hopeless(key, holding.until - arrival)) is not None:
                    raise Refused(asked.model, why)  # To read it costs more than to refuse it.
                reads, most = self._interface(key, tensors)
                decode = partial(reads.decode, request.headers, most=MOST_INPUTS)
                batch = await self._intake.read(request, decode, most, holding)
                if batch.timeout_s is not None:
                    holding.until = min(holding.until, time.monotonic() + batch.timeout_s)
                self._intake.hold_inputs(holding, len(batch.inputs))
                key = self._key(asked, request_id)  # It may be another one by now. All have one form of inputs.
                writes, _ = self._interface(key, tensors)
                writes.check_outputs(batch.outputs)
                outcomes = await self._ask(server, request, key, batch.inputs, holding.until)
                response = await self._answer(writes, batch, asked.model, key, outcomes, arrival, holding)
                if response.status_code != 200:
                    logger.warning("Request %s: %s", request_id[:MOST_ID], bytes(response.body).decode())
                return response
        except (Refused, ServeError, HTTPError) as error:
            said = error if isinstance(error, HTTPError) else self._said(error, key)
            # Its client left less than the SLO: it wanted its answer sooner, or its body came slowly.
            hurried = holding.until < arrival + slo or holding.waited > SLOW * slo
            self._count(key, said, hurried, holding.inputs)
            raise said from None

    def _interface(self, key: str, tensors: bool) -> tuple[Interface | PlainInput, int]:
        """How the model of this key is asked, and how many bytes a body may have."""
        about = self._rollouts.answering[key]
        if tensors:
            return about.interface, MOST_TENSORS * about.most
        return PlainInput(about.interface.form), about.most

    def _said(self, error: Refused | ServeError, key: str) -> HTTPError:
        """The answer to a request that is refused, or that is none."""
        if not isinstance(error, Refused):
            return HTTPError(400, "bad_input", str(error))
        server, placed = self._controller.server, self._controller.placed
        if error.reason in MAY_HAVE_RUN | {Reason.CLOSED}:
            placed = None
        if placed is not None and (comes_in := placed.comes_in(key)) is not None:
            return refused("loading", f"model {key} is not in memory; to load it takes {comes_in:.1f} s", comes_in)
        there = server is not None and key in self._rollouts.answering
        retry_s = server.least_latency(key) if there else self._setting.slo  # type: ignore[union-attr]
        return refused(error.reason.name.lower(), error.reason.value, retry_s)

    def _key(self, asked: Route, request_id: str) -> str:
        """Of the model and version that answer the request with this id.

        Raises `HTTPError` if there is no version any more that it names.
        """
        versions, server = self._rollouts.versions, self._controller.server
        if asked.model != self._names[0]:
            return asked.model
        if not asked.version:
            able = versions.phase != "canary" or server.able_for(versions.known[1].key)  # type: ignore[union-attr]
            return versions.drawn(request_id, able).key
        if asked.version not in versions.answering:
            raise HTTPError(404, "not_found", f"version {asked.version} of {asked.model} is not there any more")
        return versions.answering[asked.version].key

    def _version_names(self) -> dict[str, tuple[str, ...]]:
        """Of each model, the versions that a request may name."""
        found: dict[str, tuple[str, ...]] = dict.fromkeys(self._names, ("1",))
        return {**found, self._names[0]: tuple(self._rollouts.versions.answering)}

    async def _answer(
        self,
        interface: Interface | PlainInput,
        batch: Asked,
        model: str,
        key: str,
        outcomes: list[tuple[int, str]],
        arrival: float,
        holding: Holding,
    ) -> Response:
        """The answer with these outcomes, which are counted: one for all inputs. Raises Refused if it is late."""
        version = labels(key)[1]
        response = next((Response(text, status) for status, text in outcomes if status != 200), None)
        if response is None:
            texts = [text for _, text in outcomes]
            size = 0 if isinstance(interface, PlainInput) else sum(map(len, texts))  # A text is answered as it is.
            encode = partial(interface.encode, batch, model, version, texts)
            try:
                body, headers = await self._intake.write(size, encode, holding)
                response = Response(body, headers=headers)
            except asyncio.TimeoutError:
                raise Refused(key, Reason.OVERDUE) from None
            except ServeError as error:
                outcomes = [_failed(error)] * len(outcomes)
                response = Response(outcomes[0][1], outcomes[0][0])
        for status, _ in outcomes:
            if status == 200:
                self._books.answered(key, time.monotonic() - arrival)
            else:
                self._books.count(key, "bad" if status == 400 else "failed")
        response.headers.setdefault("Content-Type", "application/json")
        response.headers[MODEL_VERSION] = version
        return response

    async def _ask(
        self, server: AsyncServer, request: Request, name: str, values: Sequence[Any], until: float
    ) -> list[tuple[int, str]]:
        """The status and the text of each answer of the server's model ``name``. Raises `HTTPError` and Refused."""
        source = request.headers.get(SOURCE, "")[:MOST_ID]
        if self._controller.placed is not None:
            self._controller.placed.asks(name, len(values))
        answers: list[Answer] = []
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request))
        asked: asyncio.Future[Any] = gone
        try:
            if len(values) == 1:
                answers.append(server.ask(name, values[0], until - time.monotonic(), source))
                asked = answers[0]
            else:
                asked = asyncio.ensure_future(self._ask_many(server, name, values, until, source, answers))
            await asyncio.wait({asked, gone}, timeout=until - time.monotonic(), return_when=FIRST_COMPLETED)
            if asked.done():
                return _outcomes(answers, 1) if len(values) == 1 else asked.result()
            if gone.done() and not gone.cancelled():
                self._books.count(name, "cancelled", len(values))
                raise HTTPError(400, "disconnected", "the client has gone")
            raise Refused(name, _too_late(answers, len(values)))
        finally:
            gone.cancel()
            asked.cancel()
            await self._cancel(answers)

    async def _ask_many(
        self,
        server: AsyncServer,
        name: str,
        values: Sequence[Any],
        until: float,
        source: str,
        answers: list[Answer],
    ) -> list[tuple[int, str]]:
        """As `_ask`, for several inputs, as long as they can be answered. Raises Refused.

        answers: get an answer for each that was asked for.
        """
        for at in range(0, len(values), ASKED):
            some = values[at : at + ASKED]
            async with self._intake.inputs.one(len(some) / ASKED):
                within = until - time.monotonic()
                if not at and (why := server.hopeless(name, within, len(values))) is not None:
                    raise Refused(name, why)
                if within <= 0:
                    raise Refused(name, _too_late(answers, len(values)))
                if any(one.done() and one.exception() for one in answers):
                    break
                answers += [server.ask(name, value, until - time.monotonic(), source) for value in some]
        await asyncio.wait(answers, return_when=FIRST_EXCEPTION)
        return _outcomes(answers, len(values))

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

    def _check_ready(self, asked: Route) -> None:
        """Raises `HTTPError` if no model process can answer now. asked: maybe about a model, and a version of it."""
        model, versions = asked.model, self._rollouts.versions
        server = self._controller.server_for(model)
        key = versions.answering.get(asked.version, versions.serving).key if model == self._names[0] else model
        comes_when_asked = model and self._controller.placed is not None and self._controller.placed.comes(model)
        if not comes_when_asked and not self._controller.able(server, key):
            raise refused("no_model_process", "no model process answers")

    def _count(self, name: str, said: HTTPError, hurried: bool, times: int) -> None:
        """hurried: its client left less than the SLO."""
        if said.code != "disconnected":
            became = "late" if said.code == "overdue" else f"refused: {said.code}"
            self._books.count(name, became if said.status == 503 else "bad", times, hurried)

    def _shown(self, asked: Route) -> Response:
        """What needs no model: a state, a description, or counts. Raises `HTTPError`."""
        what, name = asked.what, asked.model
        if what in ("ready", "model_ready"):
            self._check_ready(asked)
        if what in ("live", "ready"):
            return as_json(200, {what: True, "state": self._controller.doing})
        if what == "model_ready":
            return as_json(200, {"name": name, "ready": True, "state": self._controller.doing})
        if what == "metrics":
            return Response(exposition(self._books), media_type=CONTENT_TYPE_LATEST)
        if what == "server":
            return as_json(200, server_metadata())
        if what == "about":
            named, own_slo = self._version_names(), self._controller.own_slo
            trials = [
                {"trial": one.name, "value": one.value, "versions": named[one.name], **own_slo(one.name)}
                for one in self._setting.loading.trials
            ]
            return as_json(200, {"state": self._controller.doing, "slo_s": self._setting.slo, "trials": trials})
        if not self._controller.document:
            raise refused(self._controller.state, f"the models are not there yet: {self._controller.doing}")
        if what == "model":
            about = self._rollouts.answering[self._key(asked, "")]
            return as_json(200, about.interface.metadata(name, self._version_names()[name]))
        return Response(self._controller.document, media_type="application/json")

    def _check_token(self, request: Request) -> None:
        """Raises `HTTPError` for a request without the service's token. Probes need none."""
        token = self._setting.token
        if token is None or is_probe(request.scope["path"]):
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            said = "the bearer token is missing or wrong; send the header Authorization: Bearer TOKEN"
            raise HTTPError(401, "unauthorized", said, headers={"WWW-Authenticate": "Bearer"})


def _outcomes(answers: Sequence[Answer], count: int) -> list[tuple[int, str]]:
    """The status and the text of ``count`` answers, or of one's error for all. Raises Refused, whatever else failed."""
    errors = [one.exception() for one in answers if one.done() and one.exception()]
    error = min(errors, key=lambda one: not isinstance(one, Refused), default=None)
    if isinstance(error, Refused):
        raise error
    return [one.result() for one in answers] if error is None else [_failed(error)] * count


def _failed(error: BaseException) -> tuple[int, str]:
    """What Ray hands on of an error has its traceback behind it."""
    return failed(ServeError(said_of(error)))


def _too_late(answers: Sequence[Answer], count: int) -> Reason:
    """Why ``count`` inputs have no answer at their deadline. answers: to those that were asked for; none is refused."""
    if not answers:
        return Reason.LATE_ON_ARRIVAL
    return Reason.OVERDUE if len(answers) == count or any(one.sent for one in answers) else Reason.LATE


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone. The body of its request is read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
