"""A client of `fluidtune serve`: it sends inputs, and sends again what was refused before a model had seen it.

`AsyncClient` does it; `Client` runs one on an event loop in a thread, so that a time-out bounds a call whatever the
service does. Both need httpx: ``pip install "fluidtune[client]"``.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from fluidtune.errors import FluidTuneError
from fluidtune.serving.wire import CODES, REQUEST_ID, TIMEOUT

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
#: Attempts of one call; the time-out may end it before. Judgement: a service refuses longer than that by design.
ATTEMPTS = 5
#: Seconds after which an unused connection is not used again: fewer than a server keeps it (5 is uvicorn's own
#: ``timeout_keep_alive``; `door.KEEP_ALIVE_S` is more), or a request could meet the server's closing of it.
UNUSED_S = 2.0
#: Seconds before a second try to connect, doubled each time: a front that died is back after about a second.
CONNECT_AGAIN_S = 0.25
_SECONDS = re.compile(r"[0-9]{1,6}")


class ServiceError(Exception):
    """There is no output. Its text says why.

    code: of the service, as docs/serving.md lists them, or of the client itself: "no_connection" (nothing was sent),
    "lost" (the connection ended before the answer), "timed_out", "no_service" (what answered is none of ours). status:
    of HTTP, if there was an answer.
    """

    def __init__(self, code: str, text: str, status: int | None = None):
        super().__init__(code, text, status)
        self.code, self.text, self.status = code, text, status

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


class AsyncClient:
    """Asks one service, for programs with an event loop; each client belongs to one loop.

    url: of the service, such as "http://127.0.0.1:8000". name: in place of it, that of a service of the Ray cluster,
    which is looked up once; without both, the only one there. token: what the service was started with as ``--token``.
    timeout: seconds of a call, all of its attempts together.

    A request is sent again after a 503 of the service that says when (`Retry-After`), and when nobody listens: five
    times at most, and within the time-out and the deadline. It is never sent again where a model may have seen the
    input: after "overdue", "gpu_lost", "lost_twice", "cut_off" and "model_failed", after a lost connection and a
    time-out.
    """

    def __init__(
        self, url: str | None = None, *, name: str | None = None, token: str | None = None, timeout: float = 60.0
    ):
        try:
            import httpx
        except ModuleNotFoundError:
            raise FluidTuneError('a client needs httpx; pip install "fluidtune[client]"') from None
        url = _found(url, name)
        try:
            parts = httpx.URL(url)
        except (httpx.InvalidURL, TypeError):
            parts = httpx.URL("")
        if parts.scheme not in ("http", "https") or not parts.host:
            raise FluidTuneError(f'url is {url!r}, expected one such as "http://127.0.0.1:8000"')
        if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
            raise FluidTuneError("token is empty or has other than printable ASCII characters; strip what was read")
        if not timeout > 0:
            raise FluidTuneError(f"timeout is {timeout!r}, expected seconds, more than 0")
        self._url, self._timeout = url.rstrip("/"), timeout
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=UNUSED_S)
        # Without TLS no certificates are loaded. Redirections are not followed, so it stays without.
        self._http = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, verify=parts.scheme == "https")

    async def __call__(self, value: Any, trial: str | None = None, deadline_s: float | None = None) -> Any:
        """The output for an input. Raises ServiceError.

        value: a JSON value, or an array or tensor, which is sent as lists. trial: None: the best one. deadline_s:
        seconds from the moment at which the service has the request, within which it answers or refuses.
        """
        if deadline_s is not None and not deadline_s > 0:
            raise FluidTuneError(f"deadline_s is {deadline_s!r}, expected seconds, more than 0")
        body = json.dumps(value, default=_plain, allow_nan=False).encode()
        return await self._within(self._ask("POST", f"/{quote(trial or '', safe='')}", body, deadline_s))

    async def status(self) -> dict[str, Any]:
        """The state of the service, its SLO in seconds, and its trials, the best one first."""
        found = await self._within(self._ask("GET", "/"))
        if not isinstance(found, dict) or not {"state", "trials"} <= found.keys():
            raise ServiceError("no_service", f"what answers at {self._url} is no service of FluidTune", 200)
        return found

    async def trials(self) -> list[str]:
        """The names of the trials that are served, the best one first."""
        return [one["trial"] for one in (await self.status())["trials"]]

    async def ready(self) -> bool:
        """Whether a model process can answer now. Nobody who listens is no readiness either."""
        try:
            await self._within(self._once("GET", "/readyz"))
        except ServiceError as error:
            if error.code == "no_connection" or error.status == 503:
                return False
            raise
        return True

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    async def _within(self, asking: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wait_for(asking, self._timeout)
        except asyncio.TimeoutError:
            raise ServiceError("timed_out", f"no answer of {self._url} within {self._timeout:g} s") from None

    async def _ask(self, method: str, path: str, body: bytes | None = None, deadline_s: float | None = None) -> Any:
        """The answer of one attempt or of several."""
        began = time.monotonic()
        until = began + min(self._timeout, deadline_s or self._timeout)
        number = uuid.uuid4().hex  # One for all attempts, so that all ask the same version.
        for attempt in range(ATTEMPTS):
            left = until - time.monotonic()
            headers = {REQUEST_ID: number}
            if deadline_s is not None:
                headers[TIMEOUT] = str(max(1, int(1000 * left)))
            try:
                return await self._once(method, path, body, headers)
            except _TryAgain as error:
                again = error.seconds * random.uniform(1.0, 1.5)  # so that not all clients come back together
                if error.code == "no_connection":
                    again *= 2**attempt
                if attempt == ATTEMPTS - 1 or time.monotonic() + again >= until:
                    raise ServiceError(error.code, error.text, error.status) from None
                await asyncio.sleep(again)

    async def _once(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Any:
        import httpx

        try:
            answer = await self._http.request(method, self._url + path, content=body, headers=headers)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _TryAgain(CONNECT_AGAIN_S, "no_connection", f"nobody answers at {self._url}: {error}") from None
        except httpx.HTTPError as error:
            said = f"the connection to {self._url} was lost; whether a model has run is not known: {error!r}"
            raise ServiceError("lost", said) from None
        return _read(answer, self._url)


class Client:
    """Asks one service, for programs without an event loop, from any thread. Parameters and errors: `AsyncClient`."""

    def __init__(
        self, url: str | None = None, *, name: str | None = None, token: str | None = None, timeout: float = 60.0
    ):
        self._make = functools.partial(AsyncClient, _found(url, name), token=token, timeout=timeout)
        #: By process: a forked one must not write into its parent's connections.
        self._made = {os.getpid(): self._make()}

    def __call__(self, value: Any, trial: str | None = None, deadline_s: float | None = None) -> Any:
        """The output for an input. Raises ServiceError."""
        return self._run(self._client(value, trial, deadline_s))

    def status(self) -> dict[str, Any]:
        """The state of the service, its SLO in seconds, and its trials, the best one first."""
        return self._run(self._client.status())

    def trials(self) -> list[str]:
        """The names of the trials that are served, the best one first."""
        return self._run(self._client.trials())

    def ready(self) -> bool:
        """Whether a model process can answer now."""
        return self._run(self._client.ready())

    def close(self) -> None:
        self._run(self._client.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return functools.partial(Client, *self._make.args, **self._make.keywords), ()

    @property
    def _client(self) -> AsyncClient:
        own = os.getpid()
        return self._made.get(own) or self._made.setdefault(own, self._make())

    def _run(self, asking: Coroutine[Any, Any, T]) -> T:
        asked = asyncio.run_coroutine_threadsafe(asking, _loop())
        try:
            return asked.result()
        except BaseException:  # Ctrl-C among them
            asked.cancel()
            raise


class _TryAgain(ServiceError):
    """No model has seen the input, and it may be sent again after these seconds."""

    def __init__(self, seconds: float, code: str, text: str, status: int | None = None):
        super().__init__(code, text, status)
        self.seconds = seconds


#: By process, the event loop of all its clients. (Not under a lock, which a process that is forked meanwhile would
#: have for ever.)
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all clients of this process, one for all threads, also where several ask first at once."""
    own = os.getpid()
    if own not in _loops:
        made = asyncio.new_event_loop()
        if _loops.setdefault(own, made) is made:
            threading.Thread(target=made.run_forever, name="fluidtune-client", daemon=True).start()
        else:
            made.close()
    return _loops[own]


def _read(answer: httpx.Response, url: str) -> Any:
    """The JSON value of a 200. Raises ServiceError."""
    value: Any = None
    with suppress(ValueError, RecursionError):
        value = answer.json()
        if answer.status_code == 200:
            return value
    code = value.get("code") if isinstance(value, dict) else None
    if not isinstance(code, str) or code not in CODES:
        said = f"what answers at {url} is no service of FluidTune: {answer.status_code} {answer.text[:200]!r}"
        raise ServiceError("no_service", said, answer.status_code)
    text = str(value.get("reason") or value.get("error"))
    again = _SECONDS.fullmatch(answer.headers.get("Retry-After", ""))
    if answer.status_code == 503 and not CODES[code].may_have_run and again is not None:
        raise _TryAgain(int(again[0]), code, text, 503)
    raise ServiceError(code, text, answer.status_code)


def _found(url: str | None, name: str | None) -> str:
    """The URL of the service. Raises FluidTuneError if both are given, or if there is no such service."""
    if url is not None and name is not None:
        raise FluidTuneError(f"url is {url!r} and name is {name!r}; leave one of the two out")
    if url is not None:
        return url
    import ray

    from fluidtune.ray_compat.cluster_address import join
    from fluidtune.serving.running_services import find

    if not ray.is_initialized() and not join():
        raise FluidTuneError("there is no Ray cluster here in which a service has a name; give its url")
    return find(name).status()["url"]


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"an input has a {type(value).__name__}, expected what JSON has: numbers, text, lists, objects")
