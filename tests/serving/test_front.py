"""How the front reads a request, without Ray."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.serve

MOST = 10


def read(chunks, length=None):
    """The body of a request that comes in these chunks, and how many of them were read."""
    from starlette.requests import Request

    from fluidtune.serving.front import _body, _TooLarge

    asked = 0

    async def receive():
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": chunks[asked - 1], "more_body": asked < len(chunks)}

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
    try:
        return asyncio.run(_body(request, MOST)), asked
    except _TooLarge as error:
        return str(error), asked


def test_a_body_is_read_whole_up_to_the_limit():
    assert read([b"12345", b"67890"], 10) == (b"1234567890", 2)


@pytest.mark.parametrize(("length", "read_chunks"), [(11, 0), (None, 2), (3, 2), ("x", 2)])
def test_of_a_body_that_is_too_large_no_more_than_the_limit_is_kept(length, read_chunks):
    said, chunks = read([b"123456", b"789012", b"345678"], length)
    assert said == "the body has more than 10 bytes; send less, or serve with a larger max_body"
    assert chunks == read_chunks


def test_without_a_lease_requests_are_refused_at_once(monkeypatch):
    from starlette.requests import Request

    from fluidtune.serving import front
    from fluidtune.serving.books import Books

    monkeypatch.setattr(front.Front, "__del__", lambda self: None)
    asked = object.__new__(front.Front)
    asked._names, asked._books, asked._asked, asked._state = ["t"], Books(["t"]), 0, "serving"
    asked._server, asked._way = SimpleNamespace(unanswered=1, hopeless=lambda name, within: False), None
    asked._devices = SimpleNamespace(count=0, waits="waiting for a lease of a GPU", trouble="")
    asked._setting, asked._models = SimpleNamespace(max_body=MOST, slo=0.5), {"t": None}

    async def receive():
        return {"type": "http.request", "body": b"1", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b"", "server": ("h", 80)}
    answer = asyncio.run(asked(Request(scope, receive)))
    said = "the service has no device now: waiting for a lease of a GPU"
    assert (answer.status_code, json.loads(answer.body)) == (503, {"error": "refused", "reason": said})
    assert asked._books.requests("t") == {"refused: no_lease": 1}
    asked._devices.trouble = "another app of that name"
    asked._server.closed, asked._ends = False, threading.Event()
    with pytest.raises(RuntimeError, match="another app of that name"):
        asked.check_health()


@pytest.mark.parametrize("path", ["/", "/-/way"])
def test_more_open_requests_than_the_limit_are_refused_unread(monkeypatch, path):
    from starlette.requests import Request

    from fluidtune.serving import front
    from fluidtune.serving.books import Books

    asked = object.__new__(front.Front)
    monkeypatch.setattr(front.Front, "__del__", lambda self: None)
    asked._names, asked._books, asked._asked, asked._way = ["t"], Books(["t"]), front.MOST_OPEN, None

    async def receive():
        raise AssertionError("nothing is to be read")

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "server": ("h", 80)}
    answer = asyncio.run(asked(Request(scope, receive)))
    assert (answer.status_code, json.loads(answer.body)["reason"]) == (503, "10000 requests are open already")
    assert asked._books.requests("t") == ({"refused: too_many": 1} if path == "/" else {})
    assert asked._asked == front.MOST_OPEN


@pytest.mark.parametrize("path", ["/", "/-/way"])
def test_what_is_hopeless_is_refused_unread_but_not_the_front_s_own_request(path):
    from starlette.requests import Request

    from fluidtune.serving import front
    from fluidtune.serving.books import Books
    from symphony_serve.errors import Refused

    class Front(front.Front):
        def __del__(self):
            """Nothing was started."""

    asked = object.__new__(Front)
    asked._names, asked._books, asked._asked, asked._way = ["t"], Books(["t"]), 0, None
    asked._setting, asked._models = SimpleNamespace(max_body=MOST, slo=0.5), {"t": None}
    withins = []
    asked._server = SimpleNamespace(
        unanswered=9, hopeless=lambda name, within: withins.append(within) or True, submit=None
    )
    read = []

    async def receive():
        read.append(True)
        return {"type": "http.request", "body": b"1", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "server": ("h", 80)}
    answer = asyncio.run(asked(Request(scope, receive)))
    if path == "/":
        said = {"error": "refused", "reason": "too many requests wait before it"}
        assert (answer.status_code, json.loads(answer.body), read) == (503, said, [])
        with pytest.raises(Refused, match="too many requests wait before it"):
            asyncio.run(asked(1))
        assert asked._books.requests("t") == {"refused: queue_full": 2}
        assert withins == [0.5, 0.5]
    else:
        assert (answer.status_code, read) == (200, [True])
        assert asked._books.requests("t") == {}


@pytest.mark.parametrize(
    ("way", "unanswered", "left"),
    [(0.1, 0, 0.4), (0.1, 5, 0.4), (0.35, 0, 0.5), (0.35, 1, 0.15), (0.6, 3, -0.1)],
)
def test_the_way_counts_unless_nothing_would_be_tried_any_more(way, unanswered, left):
    from fluidtune.serving import front
    from symphony_serve.delays import Delays
    from symphony_serve.profiles import Profile

    model = SimpleNamespace(name="t", delays=Delays(jitter=0.01))
    server = SimpleNamespace(unanswered=unanswered, profile=lambda name: Profile.linear(0.0, 0.2, 4))
    assert front.left(server, model, 0.5, way) == pytest.approx(left)
