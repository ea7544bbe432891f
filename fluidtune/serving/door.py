"""The front door: uvicorn on one address, with limits on what connections may hold before a request is there.

A request's own limits are in `intake`. Here are those of a connection: how many there are, the seconds and bytes until
a request's head is complete, the seconds that an idle one stays, and those that a client takes to read.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
import socket
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fluidtune.serving.address import listening

#: Connections at once, if the process may open twice as many files; else half of its files.
MOST_CONNECTIONS = 10_000
#: Seconds until a request's head is there, and its bytes. Source: Apache's `RequestReadTimeout header=20-40`, and the
#: 32 KiB that nginx's `large_client_header_buffers` hold.
HEAD_S, MOST_HEAD = 20.0, 32 << 10
#: Seconds that a connection stays without a request. Source: nginx's `keepalive_timeout`.
KEEP_ALIVE_S = 75
#: Seconds after which a client that takes nothing of what was written is cut off. Source: nginx's `send_timeout`.
WRITE_S = 60
#: Bytes of written answers that clients have not taken, of all connections. If there are more, the client that has not
#: taken its answer for the longest is cut off. Judgement: more than clients that do read leave of a burst of large
#: answers, and as much memory as the bodies need that `intake.MOST_BYTES` allows.
MOST_UNREAD = 512 << 20
#: The answer to a connection too many.
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b'Content-Length: 86\r\n\r\n{"error": "refused", "code": "too_many_connections", "reason": "too many connections"}'
)


class Connection(HttpToolsProtocol):
    """One connection. uvicorn and httptools read and write it; here are the limits that they have not.

    While no request is being answered, uvicorn's timer of an idle connection runs, or the one here. What is no request,
    for example an empty line, puts neither off.
    """

    #: Closes it, unless the head of a request is complete before.
    _late: asyncio.TimerHandle | None = None
    #: Bytes since a head was complete or the last part of a body came; and what is incomplete: "head", "body", or "".
    _fresh, _begun = 0, ""
    #: Bytes that the names and values of a head have, and how many hosts it names.
    _head = _hosts = 0
    #: Whether the head that is read is the second one of a request.
    _framed = False
    #: What is said of a request that is none: the status, a code, a text.
    _said = 400, "bad_request", "the request is no HTTP/1.1"
    #: Since when the client has to take what was written before more is.
    _full_since = math.inf

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.write(_FULL)
            transport.close()
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._fresh += len(data)
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as asked:
                    data = data[asked.args[0] :]
                    self._read_on()
            # Of a body, only what is around its parts counts: the sizes of chunks, and the trailer.
            if self._fresh > MOST_HEAD:
                raise self._too_large()
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._begun and (self.cycle is None or self.cycle.response_complete):
            self._wait()

    def _read_on(self) -> None:
        """The wish to speak something else than HTTP/1.1 is ignored (RFC 9110, section 7.8).

        httptools takes the request for complete behind its head. A second head lets it read the body.
        """
        self._framed, self.cycle.more_body = True, True
        framing = [one for one in self.scope["headers"] if one[0] in (b"content-length", b"transfer-encoding")]
        self.parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *(b"%b: %b\r\n" % one for one in framing), b"\r\n"]))

    # The parser calls these.

    def on_message_begin(self) -> None:
        if not self._framed:
            super().on_message_begin()
            self._begun, self._head, self._hosts = "head", 0, 0

    def on_url(self, url: bytes) -> None:
        if not self._framed:
            super().on_url(url)
            self._head += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._begun == "head" and not self._framed:  # else it is of a trailer, which nobody reads
            super().on_header(name, value)
            self._head += len(name) + len(value)
            self._hosts += name.lower() == b"host"

    def on_headers_complete(self) -> None:
        if self._framed:
            self._framed, self._begun = False, "body"
            return
        self._wait_no_more()
        if self._head > MOST_HEAD:
            raise self._too_large()
        if self.parser.get_http_version() == "1.1" and self._hosts != 1:  # RFC 9112, section 3.2
            self._said = 400, "bad_request", f"the request has {self._hosts} headers Host, expected one"
            raise httptools.HttpParserError
        self._begun, self._fresh = "body", 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._fresh = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._begun, self._fresh = "", 0
        if self.cycle.response_complete:  # the body of a refused request: uvicorn's timer runs again
            self._wait_no_more()
            self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_S, self.timeout_keep_alive_handler)

    # The loop and uvicorn call these.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._begun and self.timeout_keep_alive_task is not None:  # no request is there, but a part of one
            self._wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._full_since = self.loop.time()
        full = [one for one in self.connections if isinstance(one, Connection) and one._full_since < math.inf]
        unread = sum(one.transport.get_write_buffer_size() for one in full)
        for longest in sorted(full, key=lambda one: one._full_since)[:-1]:
            if unread > MOST_UNREAD:
                unread -= longest.transport.get_write_buffer_size()
                longest.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._full_since = math.inf

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            status, code, text = self._said
            body = json.dumps({"error": text, "code": code}).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

    def _too_large(self) -> httptools.HttpParserError:
        self._said = 431, "head_too_large", f"the head has more than {MOST_HEAD} bytes"  # RFC 6585, section 5
        return httptools.HttpParserError()

    def _wait(self) -> None:
        """Close in `HEAD_S`, unless the head of a request is complete before."""
        if self._late is None and not self.transport.is_closing():
            self._wait_no_more()
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def _wait_no_more(self) -> None:
        for timer in (self._late, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        self._late = self.timeout_keep_alive_task = None


def most_connections() -> int:
    """How many connections this process takes."""
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class Door:
    """Serves an ASGI application at ``host``:``port``. It is made and closed on the event loop that runs it.

    Raises OSError if the address cannot be had.
    """

    def __init__(self, app: Any, host: str, port: int):
        self._socket = listening(host, port, MOST_CONNECTIONS)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: connections have it as well, also those that are to be closed
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * WRITE_S)
        config = uvicorn.Config(
            app,
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
