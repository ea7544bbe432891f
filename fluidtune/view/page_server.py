"""The page over HTTP, on this machine's loopback address alone: its files, and what it asks for as JSON.

What has changed comes as server-sent events. Their id is the cursor of `FollowedRun.look`, which browsers send back
after a break, and the page after it was hidden, so that it gets what it missed. Only `/api/steer`, with the token,
changes something.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from fluidtune.errors import FluidTuneError
from fluidtune.report.json_text import plain_json
from fluidtune.steering.json_values import LONGEST, read_json
from fluidtune.steering.steering_files import act_from, ask_driver, parameters_from
from fluidtune.view.followed_run import FollowedRun
from fluidtune.view.page_file import STATIC, page_text
from fluidtune.view.run_list import RunList

#: Only programs of this machine reach it.
HOST = "127.0.0.1"
#: Names by which a browser may ask. A page of another site that has its name point here asks by another one.
HOSTS = [HOST, "localhost"]
#: The header by which a page shows its token. A page of another site cannot send it.
TOKEN_HEADER = "X-FluidTune-Token"
#: Seconds between two looks at a log: a new result is on the page within a second.
LOOK_S = 0.5
#: Seconds that one look may read on: a page shows a long log while it is read.
READ_S = 0.3
#: Seconds after which a silent stream says that it lives; proxies and browsers end connections after 30 or more.
ALIVE_S = 15.0
#: Of every answer: a browser gets its scripts, styles and data from here alone, and shows the page in no other's frame.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def _json(found: Any, status: int = 200) -> Response:
    return Response(plain_json(found), status, media_type="application/json")


def page_app(runs: RunList, token: str = "") -> Starlette:
    """The application: the page at /, what it asks for below /api. ``token``: who has it may steer; "": nobody may.

    What looks at a file does so in the threadpool: a slow storage stops no other answer.
    """

    async def run_of(key: str) -> FollowedRun | None:
        return await run_in_threadpool(runs.run, key)

    async def page(request: Request) -> Response:
        return Response(page_text(), media_type="text/html")

    async def all_runs(request: Request) -> Response:
        return _json(await run_in_threadpool(runs.glances))

    async def keys(request: Request) -> Response:
        return _json(list(await run_in_threadpool(runs.logs)))

    async def stream(request: Request) -> Response:
        run = await run_of(request.query_params.get("run", ""))
        if run is None:
            return _json({"trouble": "there is no such run here any more"}, 404)
        # Browsers send the header when a stream breaks, and the page the parameter when it opens another one.
        cursor = request.headers.get("last-event-id") or request.query_params.get("cursor", "")
        return StreamingResponse(_increments(run, cursor), media_type="text/event-stream")

    def about_a_trial(tell: Callable[[FollowedRun, str], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            run, trial = await run_of(request.query_params.get("run", "")), request.query_params.get("trial", "")
            try:
                if run is None:
                    raise KeyError
                return _json(await run_in_threadpool(tell, run, trial))
            except KeyError:
                return _json({"trouble": "there is no such trial here any more"}, 404)

        return answer

    async def steer(request: Request) -> Response:
        if not token or not hmac.compare_digest(request.headers.get(TOKEN_HEADER, "").encode(), token.encode()):
            address = "the address that `fluidtune view --steer` has printed" if token else "`fluidtune view --steer`"
            return _json({"trouble": f"this page may only show: open {address}"}, 403)
        here = f"{request.url.scheme}://{request.headers['host']}"
        if request.headers.get("origin", here) != here:
            return _json({"trouble": "this is a page of another address, which may not steer"}, 403)
        try:
            said = await _body(request)
            run = await run_of(said.get("run", ""))
            # The page still shows a run that was deleted.
            if run is None or not await run_in_threadpool(run.log.is_file):
                return _json({"trouble": "there is no such run here any more"}, 404)
            act = act_from({**said, "via": "page", "parameters": {}})
        except ValueError as error:
            return _json({"trouble": str(error)}, 400)
        try:
            act = replace(act, parameters=parameters_from(said.get("parameters", [])))
            return _json({"said": await run_in_threadpool(ask_driver, run.log, act)})
        except FluidTuneError as error:
            return _json({"trouble": str(error)})  # an answer like others: browsers report a status of 400 as an error

    routes = [
        Route("/", page),
        Route("/api/steer", steer, methods=["POST"]),
        Route("/api/keys", keys),
        Route("/api/runs", all_runs),
        Route("/api/stream", stream),
        Route("/api/curve", about_a_trial(FollowedRun.curve)),
        Route("/api/story", about_a_trial(FollowedRun.story)),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)])


async def _body(request: Request) -> dict[str, Any]:
    """What a page asks for. Raises `ValueError` if it is too long, or has not the form that docs/view.md gives."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LONGEST:
            raise ValueError(f"the request has more than {LONGEST} bytes")
    said = read_json(body)
    if not isinstance(said, dict) or not isinstance(said.get("run", ""), str):
        raise ValueError("the request is no object with the key of a run")
    pairs = said.get("parameters", [])
    if not isinstance(pairs, list) or not all(isinstance(pair, str) for pair in pairs):
        raise ValueError("parameters are no list of texts such as lr=0.01")
    return said


async def _increments(run: FollowedRun, cursor: str) -> AsyncIterator[str]:
    """What a page gets of a run, for ever: each increment as one server-sent event. The first has the time, "clock"."""
    said, silent = "", 0.0
    while True:
        cursor, text, left = await run_in_threadpool(_look, run, cursor)
        if text != said:
            # The page's own clock may be another one. The time alone makes no increment.
            data = text if said else f'{{"clock":{time.time()},{text[1:]}'
            said, silent = text, 0.0
            yield f"id: {cursor}\ndata: {data}\n\n"
        elif silent >= ALIVE_S:
            silent = 0.0
            yield ": \n\n"
        wait = 0.0 if left else LOOK_S
        silent += wait
        await asyncio.sleep(wait)


def _look(run: FollowedRun, cursor: str) -> tuple[str, str, int]:
    found = run.look(cursor, READ_S)
    return found["cursor"], plain_json(found), found["left"]


def serve_page(runs: RunList, port: int, steer: bool, tell: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C. ``port``: 0 for a free one. ``tell`` gets its URL once it is served.

    ``steer``: the URL has a token, and a page that was opened by it may steer.
    """
    token = secrets.token_urlsafe(24) if steer else ""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "it is no port"
            raise FluidTuneError(f"port {port} cannot be had: {reason}; give another --port, or none for a free one")
        listening.listen(128)
        tell(f"http://{HOST}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else ""))
        config = uvicorn.Config(
            page_app(runs, token),
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=1,
            headers=list(HEADERS.items()),
        )
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
