"""The client against a stand-in that plays what a service, or something else, answers."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import fluidtune
from fluidtune import client as client_module
from fluidtune.serving.wire import CODES, TIMEOUT

#: Seconds until a test gives up.
PATIENCE_S = 60.0
LISTED = {"state": "serving", "slo_s": 0.2, "trials": [{"trial": "best", "value": 1.0}, {"trial": "a b", "value": 0.5}]}


def refusal(code: str, seconds: str | None = "0") -> tuple[int, dict[str, str], bytes]:
    headers = {} if seconds is None else {"Retry-After": seconds}
    said = {"error": "refused", "code": code, "reason": "it could not"}
    return CODES[code].status, headers, json.dumps(said).encode()


class StandIn(http.server.ThreadingHTTPServer):
    """Gives the answers of `plays` one after the other, and the last of them from then on."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.plays: list[Any] = [(200, {}, b"5")]
        self.heard: list[tuple[str, str, dict[str, str], bytes]] = []
        self.ends = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.heard.append((self.command, self.path, dict(self.headers), body))
        play = self.server.plays.pop(0) if len(self.server.plays) > 1 else self.server.plays[0]
        if isinstance(play, bytes):
            self.wfile.write(play)
            self.close_connection = True
            return
        status, headers, answer = play
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if headers.get("X-Slow"):
            while not self.server.ends.wait(0.02):
                self.wfile.write(b"5")
                self.wfile.flush()
        self.wfile.write(answer)

    do_GET = do_POST = _answer

    def log_message(self, *said: Any) -> None:
        pass


@contextlib.contextmanager
def stand_in(port: int = 0) -> Iterator[StandIn]:
    with StandIn(port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.ends.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[StandIn]:
    with stand_in() as server:
        yield server


@pytest.fixture
def client(server: StandIn) -> Iterator[fluidtune.Client]:
    with fluidtune.Client(server.url, token="secret", timeout=PATIENCE_S) as client:
        yield client


def fails(client: fluidtune.Client, **asked: Any) -> fluidtune.ServiceError:
    with pytest.raises(fluidtune.ServiceError) as found:
        client(1, **asked)
    return found.value


def test_an_input_is_sent_with_trial_token_and_deadline_and_its_output_comes_back(server, client):
    assert client(np.array([[0.5, 1]]), trial="a b/c", deadline_s=30.0) == 5
    method, path, headers, body = server.heard[0]
    assert (method, path, json.loads(body)) == ("POST", "/a%20b%2Fc", [[0.5, 1.0]])
    assert headers["Authorization"] == "Bearer secret"
    assert 1000 < int(headers[TIMEOUT]) <= 30_000
    assert client("a") == 5 and TIMEOUT not in server.heard[1][2]


def test_status_and_trials(server, client):
    server.plays = [(200, {}, json.dumps(LISTED).encode())]
    assert (client.status(), client.trials()) == (LISTED, ["best", "a b"])
    server.plays = [(200, {}, b'{"detail": "x"}')]
    with pytest.raises(fluidtune.ServiceError, match="no_service"):
        client.trials()


@pytest.mark.parametrize(
    ("play", "ready"),
    [((200, {}, b"{}"), True), (refusal("no_model_process", "5"), False), ((503, {}, b"<html>"), False)],
)
def test_readiness_is_told_at_once(server, client, play, ready):
    server.plays = [play]
    assert client.ready() is ready
    assert len(server.heard) == 1


@pytest.mark.parametrize("code", [name for name, code in CODES.items() if code.status == 503])
def test_only_what_no_model_has_seen_is_sent_again(server, client, code):
    server.plays = [refusal(code), (200, {}, b"7")]
    if CODES[code].may_have_run:
        assert (fails(client).code, len(server.heard)) == (code, 1)
    else:
        assert (client(1), len(server.heard)) == (7, 2)


def test_it_gives_up_after_its_attempts(server, client):
    server.plays = [refusal("queue_full")]
    error = fails(client)
    assert (error.code, error.status, error.text) == ("queue_full", 503, "it could not")
    assert len(server.heard) == client_module.ATTEMPTS
    assert pickle.loads(pickle.dumps(error)).code == "queue_full"


@pytest.mark.parametrize("code", [name for name, code in CODES.items() if code.status != 503])
def test_an_error_has_its_code_status_and_text(server, client, code):
    server.plays = [(CODES[code].status, {}, json.dumps({"error": "wrong", "code": code}).encode())]
    error = fails(client)
    assert (error.code, error.status, error.text, len(server.heard)) == (code, CODES[code].status, "wrong", 1)


LATE = refusal("queue_full", str(int(PATIENCE_S)))


@pytest.mark.parametrize(
    ("play", "code"),
    [
        # What would come too late, and a 503 that does not say when.
        (LATE, "queue_full"),
        *((refusal("queue_full", when), "queue_full") for when in (None, "", "soon", "-1", "1.5", "9" * 5000)),
        ((200, {}, b""), "no_service"),
        ((200, {}, b"<html>"), "no_service"),
        ((200, {}, b"[" * 100_000), "no_service"),
        ((502, {}, b"Bad Gateway"), "no_service"),
        ((503, {"Retry-After": "0"}, b"no JSON"), "no_service"),
        ((503, {"Retry-After": "0"}, b'{"code": ["queue_full"]}'), "no_service"),
        ((503, {"Retry-After": "0"}, b'{"code": "of another"}'), "no_service"),
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), "no_service"),
        (b"", "lost"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n5", "lost"),
        (b"garbage\r\n\r\n", "lost"),
    ],
)
def test_what_is_final_has_its_code_and_is_asked_once(server, client, play, code):
    server.plays = [play]
    assert fails(client).code == code
    assert len(server.heard) == 1
    if play is LATE:
        assert fails(client, deadline_s=3.0).code == code and len(server.heard) == 2


def test_a_slow_answer_ends_at_the_time_out_though_bytes_come(server):
    server.plays = [(200, {"Content-Length": "1000000", "X-Slow": "1"}, b"")]
    with fluidtune.Client(server.url, timeout=0.5) as client:
        assert fails(client).code == "timed_out"
    assert len(server.heard) == 1


def test_nobody_listens(monkeypatch):
    monkeypatch.setattr(client_module, "CONNECT_AGAIN_S", 2 * PATIENCE_S)  # later than the time-out
    with stand_in() as gone:
        pass
    with fluidtune.Client(gone.url, timeout=PATIENCE_S) as client:
        assert fails(client).code == "no_connection"
        assert not client.ready()


def test_a_service_that_is_started_anew_is_found_again(monkeypatch):
    refused, output = threading.Event(), []
    # It is asked for before each further attempt.
    monkeypatch.setattr(client_module.random, "uniform", lambda low, high: refused.set() or low)
    with stand_in() as gone:
        pass
    with fluidtune.Client(gone.url, timeout=PATIENCE_S) as client:
        asking = threading.Thread(target=lambda: output.append(client(1)))
        asking.start()
        assert refused.wait(PATIENCE_S)
        with stand_in(gone.server_port):
            asking.join(PATIENCE_S)
    assert output == [5]


def test_one_client_serves_many_threads_and_is_pickled_without_its_connections(server, client):
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(pickle.loads(pickle.dumps(client)))
        threads = [threading.Thread(target=one, args=(number,)) for number in range(8) for one in (client, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert sorted(int(body) for _, _, _, body in server.heard) == sorted([*range(8)] * 2)
    assert {headers["Authorization"] for _, _, headers, _ in server.heard} == {"Bearer secret"}


def test_the_asynchronous_client_asks_at_the_same_time(server, client):
    blocking = client

    async def ask() -> list[Any]:
        async with fluidtune.AsyncClient(server.url, timeout=PATIENCE_S) as client:
            # The other client works within a running loop, too.
            return [*await asyncio.gather(*(client(number) for number in range(4)), client.ready()), blocking(1)]

    assert asyncio.run(ask()) == [5, 5, 5, 5, True, 5]


@pytest.mark.parametrize(
    ("url", "others", "said"),
    [
        ("127.0.0.1:8000", {}, "url is"),
        ("ftp://host", {}, "url is"),
        ("http://", {}, "url is"),
        ("http://host:port", {}, "url is"),
        ("http://host", {"timeout": 0}, "timeout is 0"),
        ("http://host", {"token": "secret\n"}, "token"),
        ("http://host", {"token": ""}, "token"),
    ],
)
def test_a_wrong_setting_is_refused(url, others, said):
    with pytest.raises(fluidtune.FluidTuneError, match=said):
        fluidtune.Client(url, **others)


@pytest.mark.parametrize(("value", "error"), [(float("nan"), ValueError), ({1, 2}, TypeError)])
def test_an_input_that_is_no_json_is_not_sent(server, client, value, error):
    with pytest.raises(error):
        client(value)
    assert not server.heard


def test_a_call_within_a_running_loop_works(server, client):
    async def ask() -> Any:
        return client(1)

    assert asyncio.run(ask()) == 5
