"""What a connection may hold before a request is there, with a real uvicorn and an application of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from functools import partial

import pytest

from benchmarks.common import free_ports
from benchmarks.served_by_thread import LoopThread
from fluidtune.serving import door as doors
from fluidtune.serving.door import Door
from tests.serve.driving import until

pytestmark = pytest.mark.serve

#: Less than a connection stays without a request.
PATIENCE_S = 60.0


async def app(scope, receive, send):
    """``/late`` answers when the body is there, ``/large`` with 8 MB, ``/some`` with 60 KB, others at once."""
    while scope["path"] == "/late" and (await receive()).get("more_body"):
        pass
    body = b"x" * {"/large": 8 << 20, "/some": 60_000}.get(scope["path"], 0) or b"ok"
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def narrow(monkeypatch, request):
    """In the kernel the connections of a door that is made after this have buffers of so many bytes."""
    listening = doors.listening

    def made(*given):
        one = listening(*given)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, request.param)
        return one

    monkeypatch.setattr(doors, "listening", made)


@pytest.fixture
def door():
    """The port of a door, and its connections."""
    thread, (port,) = LoopThread(), free_ports(1)
    made = thread.call(lambda: Door(app, "127.0.0.1", port))
    while not made._server.started:
        thread.run(asyncio.sleep(0.001))
    yield port, made._server.server_state.connections
    thread.run(made.close())
    thread.end()


@pytest.fixture
def limit(monkeypatch):
    """Sets a limit of doors."""
    return partial(monkeypatch.setattr, doors)


def connected(port, text=b""):
    one = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    one.sendall(text)
    return one


def answered(one):
    """It has got the whole of a small answer."""
    said = b""
    while not said.endswith(b"ok"):
        said += one.recv(1 << 16)


def rest(one):
    """All that comes until the connection ends."""
    said = b""
    while more := one.recv(1 << 16):
        said += more
    return said


@pytest.mark.parametrize("begun", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nA: "])
def test_a_head_that_does_not_come_is_not_waited_for(door, limit, begun):
    limit("HEAD_S", 0.05)
    with connected(door[0], begun) as one:
        assert rest(one) == b""


CHUNKED = b"POST /%b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("line", [b"A: " + b"b" * 1000 + b"\r\n", b"b" * 1000], ids=["lines", "one line"])
@pytest.mark.parametrize(
    "before", [b"GET / HTTP/1.1\r\n", *(CHUNKED % path + b"1\r\nx\r\n0\r\n" for path in (b"late", b"now"))]
)
def test_a_head_or_a_trailer_without_end_is_cut_off(door, before, line):
    """Seen: a client could fill the front's memory by a trailer, 300 MB a second."""
    with connected(door[0], before) as one, pytest.raises(ConnectionError):
        for _ in range(10_000):
            one.sendall(line)


def test_what_a_trailer_says_is_left_out_and_the_next_request_follows(door):
    text = CHUNKED % b"late" + b"1\r\nx\r\n0\r\nA: b\r\n\r\nGET / HTTP/1.0\r\nConnection: close\r\n\r\n"
    with connected(door[0], text) as one:
        assert rest(one).count(b"200 OK") == 2


HEAD = b"POST /now HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"
GET = b"GET /now HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("parts", [(HEAD, b"1", b"2"), (GET, b"GET /"), (GET + b"GET /",), (HEAD + b"1",)])
def test_what_has_begun_when_no_request_is_answered_has_the_time_of_a_head(door, limit, parts):
    """Seen: a connection whose body came after a refusal had no time limit, half a head that came before had 75 s."""
    limit("HEAD_S", 0.05)
    first, *others = parts
    with connected(door[0], first) as one, contextlib.suppress(ConnectionError):  # it may end before all has come
        answered(one)
        for part in others:
            one.sendall(part)
        rest(one)


@pytest.mark.parametrize("parts", [(HEAD, b"1", b"23"), (HEAD + b"1", b"23" + HEAD, b"123")])
def test_a_connection_stays_when_the_body_of_a_refused_request_is_complete(door, limit, parts):
    """Seen: it was closed after the time of a head."""
    limit("HEAD_S", 1.0)
    with connected(door[0]) as one:
        for part in parts:
            one.sendall(part)
            if HEAD in part:
                answered(one)
        time.sleep(1.2)
        one.sendall(b"GET / HTTP/1.0\r\n\r\n")
        answered(one)


def test_requests_that_come_at_once_are_answered_in_turn(door):
    with connected(door[0], GET.replace(b"now", b"some") + 2 * GET + b"GET /some HTTP/1.0\r\n\r\n") as one:
        bodies = [said.split(b"\r\n\r\n")[1] for said in rest(one).split(b"HTTP/1.1 200 OK")[1:]]
    assert [len(body) for body in bodies] == [60_000, 2, 2, 60_000]


def test_a_service_starts_where_the_kernel_cuts_off_no_slow_reader(monkeypatch, request):
    """macOS. Seen: `fluidtune serve start` ended there with an AttributeError."""
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT")
    with connected(request.getfixturevalue("door")[0], GET) as one:
        answered(one)


def test_an_empty_line_now_and_then_does_not_keep_a_connection(limit, request):
    """Seen: a connection with an empty line after an answer had no time limit any more."""
    limit("KEEP_ALIVE_S", 0.3)
    port, connections = request.getfixturevalue("door")
    with connected(port, GET) as one, contextlib.suppress(ConnectionError):
        answered(one)
        one.settimeout(0.01)
        for _ in range(1000):
            with contextlib.suppress(TimeoutError):
                assert one.recv(1) == b""
                break
            one.sendall(b"\r\n")
    assert not connections


@pytest.mark.parametrize("narrow", [4096], indirect=True)
@pytest.mark.parametrize("end", [b"", b"Connection: close\r\n"], ids=["idle", "close"])
@pytest.mark.parametrize("path", [b"some", b"large"])
def test_a_client_that_takes_nothing_is_cut_off(limit, narrow, request, path, end):
    """Seen: it had no time limit. What is left of 60 KB is less than makes a loop ask that no more be written."""
    limit("WRITE_S", 1)
    port, connections = request.getfixturevalue("door")
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", port))
        one.sendall(b"GET /%b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (path, end))
        one.recv(1)
        until(lambda: not connections)


def test_a_body_that_is_read_takes_its_time_and_the_next_request_follows(door, limit):
    limit("HEAD_S", 0.3)
    with connected(door[0], b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n") as one:
        for _ in range(4):
            time.sleep(0.2)  # longer than a head may take, all together
            one.sendall(b"1")
        one.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert rest(one).count(b"\r\n\r\nok") == 2


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_a_body_is_read_whatever_else_its_client_would_rather_speak(door, size):
    """Java's HttpClient asks for HTTP/2 with each first request. However its bytes come."""
    head = b"POST /late HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nuPGRADE: h2c\r\nContent-Length: 10\r\n\r\n"
    text = 2 * (head + b"\nupgrade: ") + b"GET / HTTP/1.0\r\n\r\n"
    with connected(door[0]) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(text), size):
            one.sendall(text[at : at + size])
        assert rest(one).count(b"\r\n\r\nok") == 3


@pytest.mark.parametrize(
    ("head", "status"),
    [(b"", b"400"), (b"Host: x\r\nHost: y\r\n", b"400"), (b"Host: x\r\nA: " + b"a" * 40_000 + b"\r\n", b"431")],
)
def test_a_head_without_one_host_or_above_the_limit_is_refused_as_json(door, head, status):
    with connected(door[0], b"GET / HTTP/1.1\r\n" + head + b"\r\n") as one:
        said, body = rest(one).split(b"\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 " + status) and json.loads(body)["code"] in ("bad_request", "head_too_large")


@pytest.mark.parametrize("narrow", [256 << 10], indirect=True)
def test_of_answers_that_nobody_takes_a_bounded_number_of_bytes_is_held(narrow, door, limit):
    """The client that has taken nothing for the longest is cut off. Seen: such clients held the front's memory."""
    limit("MOST_UNREAD", 17 << 20)
    port, connections = door
    clients = []

    def held():
        return sum(one.transport.get_write_buffer_size() > 1 << 20 for one in connections)

    for number in (1, 2, 2):  # the third is too much for the first
        clients.append(connected(port, b"GET /large HTTP/1.0\r\n\r\n"))
        clients[-1].recv(1, socket.MSG_PEEK)
        until(lambda number=number: held() == number)
    first, *others = clients
    with contextlib.suppress(ConnectionError):
        assert len(rest(first)) < 8 << 20
    assert [rest(one).count(b"x") for one in others] == [8 << 20] * 2
    for one in clients:
        one.close()


def test_more_connections_than_the_limit_are_told_so(door, limit):
    limit("MOST_CONNECTIONS", 2)
    port, _ = door
    some = [connected(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(2)]
    for one in some:
        one.recv(1)
    with connected(port) as one:
        assert b'"too_many_connections"' in rest(one)
    for one in some:
        one.close()

    def answers():
        with connected(port, b"GET / HTTP/1.0\r\n\r\n") as one:
            return rest(one).endswith(b"ok")

    until(answers)
