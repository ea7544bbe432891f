"""The front door: uvicorn on one address, with limits on what connections may hold before a request is there.

A request's own limits are in `intake`. Here are those of a connection: how many there are, the seconds and bytes until
a request's head is complete, the seconds that an idle one stays, and those that a client takes to read.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fluidtune.serving.address import listening
from symphony_serve.reading import PIECE

#: Connections at once, if the process may open twice as many files; else half of its files.
MOST_CONNECTIONS = 10_000
#: Seconds until a request's head is there, and its bytes. Source: Apache's `RequestReadTimeout header=20-40`, and the
#: 32 KiB that nginx's `large_client_header_buffers` hold.
HEAD_S, MOST_HEAD = 20.0, 32 << 10
#: Seconds that a connection stays without a request. Source: nginx's `keepalive_timeout`.
KEEP_ALIVE_S = 75
#: Seconds until a client that reads too slowly has taken what is in the buffers. Source: nginx's `send_timeout`.
WRITE_S = 60.0
#: Bytes of written answers that clients have not taken, of all connections. If there are more, the client that has not
#: taken its answer for the longest is cut off. Judgement: more than clients that do read leave of a burst of large
#: answers, and as much memory as the bodies need that `intake.MOST_BYTES` allows.
MOST_UNREAD = 512 << 20
#: In a head, the wish to speak something else. It is not granted, and so the parser must not see it: it would take the
#: body for what is spoken then. (llhttp has no switch for that.)
_UPGRADE = b"upgrade:"
#: The answer to a connection too many.
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b'Content-Length: 86\r\n\r\n{"error": "refused", "code": "too_many_connections", "reason": "too many connections"}'
)


class Connection(HttpToolsProtocol):
    """One connection. It is closed if a head, the rest of a body that nobody reads, or a reader takes too long.

    While no request is being answered, one of its timers runs.
    """

    #: Closes it, unless what is due comes before.
    _late: asyncio.TimerHandle | None = None
    _slow: asyncio.TimerHandle | None = None
    #: Bytes of a head that is not complete, or since the last part of a body; and whether the latest body is complete.
    _fresh, _whole = 0, True
    #: Bytes that the names and values of a head have, how many hosts it names, and the bytes that the body still has.
    _head = _hosts = _left = 0
    #: What may be the begin of a line that asks for an upgrade, and whether what is fed next begins a line.
    _held, _new_line = b"", True
    #: What is said of a request that is none: the status, a code, a text.
    _said = 400, "bad_request", "the request is no HTTP/1.1"

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.write(_FULL)
            transport.close()
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        self._taken()
        if self.timeout_keep_alive_task is not None:  # uvicorn cancels it only if there was no error
            self.timeout_keep_alive_task.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if len(data) < self._left:  # All of it is body.
            self._feed(data)
            self._new_line = data.endswith(b"\n")
            return
        data, self._held = self._held + data, b""
        line = data.rfind(b"\n") + 1
        tail = data[line:] if line or self._new_line else b""
        held = len(tail) if _UPGRADE.startswith(tail.lower()) else 0
        whole = data[: len(data) - held] if held else data
        parts = whole.splitlines(keepends=True) if _UPGRADE in whole.lower() else [whole]
        for part in [*parts, tail[:held]]:
            if self._whole and held and part == tail:
                self._held = tail
            elif part and not self.transport.is_closing():
                asks = self._whole and self._new_line and part[: len(_UPGRADE)].lower() == _UPGRADE
                self._feed(b"X-Asked" + part[7:] if asks else part)
                self._new_line = part.endswith(b"\n")

    def _feed(self, data: bytes) -> None:
        """Let the parser read. Of a head with `_UPGRADE` in it, a line at a time."""
        self._fresh += len(data)
        idle = self.timeout_keep_alive_task
        super().data_received(data)
        # Of a body, only what is around its parts counts: the sizes of chunks, and the trailer.
        if self._fresh > MOST_HEAD and (self._late is not None or not self._whole):
            self._too_large()
            self.send_400_response("")
        if self.transport.is_closing():
            self._to_be_taken()
        elif self._late is None and (self.cycle is None or self.cycle.response_complete):
            # uvicorn arms this timer at the end of an answer only, and whatever comes cancels it. What is no request,
            # for example an empty line, does not put it off.
            due = idle.when() if idle is not None else self.loop.time() + self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_at(due, self.timeout_keep_alive_handler)

    # The parser calls these.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = self._hosts = self._left = 0
        self._wait()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._whole:  # else it is of a trailer, which nobody reads
            super().on_header(name, value)
            self._head += len(name) + len(value)
            self._hosts += name.lower() == b"host"
            if name.lower() == b"content-length" and value.isdigit():
                self._left = int(value[:20])

    def on_headers_complete(self) -> None:
        self._wait_no_more()
        if self._head > MOST_HEAD:
            self._too_large()
            raise httptools.HttpParserError
        if self.parser.get_http_version() == "1.1" and self._hosts != 1:  # RFC 9112, section 3.2
            self._said = 400, "bad_request", f"the request has {self._hosts} headers Host, expected one"
            raise httptools.HttpParserError
        self._whole, self._fresh = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._fresh = 0
        self._left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._whole = True
        self._wait_no_more()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._to_be_taken()
        elif not self._whole:
            self._wait()

    # The loop and uvicorn call these.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._to_be_taken()
        slow = [one for one in self.connections if isinstance(one, Connection) and one._slow is not None]
        unread = sum(one.transport.get_write_buffer_size() for one in slow)
        for longest in sorted(slow, key=Connection._due)[:-1]:
            if unread > MOST_UNREAD:
                unread -= longest.transport.get_write_buffer_size()
                longest._taken()
                longest.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._taken()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            status, code, text = self._said
            body = json.dumps({"error": text, "code": code}).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
            self._close()

    def _too_large(self) -> None:
        self._said = 431, "head_too_large", f"the head has more than {MOST_HEAD} bytes"  # RFC 6585, section 5

    def _close(self) -> None:
        """Close when what was written is taken, at the latest in `WRITE_S`."""
        self.transport.close()
        self._to_be_taken()

    def _to_be_taken(self) -> None:
        """What was written is to be taken in `WRITE_S`."""
        if self._slow is None:
            self._slow = self.loop.call_later(WRITE_S, self.transport.abort)

    def _due(self) -> float:
        """When what was written must be taken, on the loop's clock."""
        return self._slow.when() if self._slow is not None else math.inf

    def _taken(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _wait(self) -> None:
        """Close in `HEAD_S`, unless what is waited for comes."""
        self._fresh = 0
        if self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._close)

    def _wait_no_more(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _to_the_end(app: Any) -> Any:
    """The application, whose large answers end when their clients have taken nearly all.

    uvicorn takes an answer for sent when it is written. Then a client could ask on, and let the next ones wait as well.
    """

    async def sends(scope: Any, receive: Any, send: Any) -> None:
        async def send_part(message: Any) -> None:
            if len(message.get("body", b"")) > PIECE and not message.get("more_body"):
                await send({**message, "more_body": True})
                message = {"type": message["type"]}
            await send(message)  # waits until it may write

        await app(scope, receive, send_part)

    return sends


def most_connections() -> int:
    """How many connections this process takes."""
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class Door:
    """Serves an ASGI application at ``host``:``port``. It is made and closed on the event loop that runs it.

    Raises OSError if the address cannot be had.
    """

    def __init__(self, app: Any, host: str, port: int):
        self._socket = listening(host, port, MOST_CONNECTIONS)
        config = uvicorn.Config(
            _to_the_end(app),
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._socket]), name="serve-door")

    async def close(self) -> None:
        """Close the port, and the connections when their answers are sent."""
        self._server.should_exit = True
        await self._task
        self._socket.close()
