"""The HTTP key-value server through which the members of one Horovod group find each other.

Horovod's gloo reads and writes addresses under ``/SCOPE/KEY``, and deletes a key when it is done. A GET of a key that
is not there yet waits for a moment, which spares a second request. Each generation has its own server, so that no
member reads what one of an older generation still writes. Horovod's client has no secret, so every process that reaches
the port is served. The values are handed on as bytes, and nothing here reads them.
"""

from __future__ import annotations

import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

#: Seconds that a GET waits for its key.
HOLD_S = 0.25
#: The most bytes of a value: gloo writes about 140 bytes for each member of the group.
VALUE_SIZE = 1 << 20


class Rendezvous(socketserver.ThreadingMixIn, HTTPServer):
    """Serves from construction until `close`.

    ``host``: an IPv4 address of this machine; the port is a free one. ``values``: the initial values, by path.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, host: str, values: dict[str, bytes]) -> None:
        super().__init__((host, 0), _Handler)
        self.values = dict(values)
        self.changed = threading.Condition()
        self._off = False
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="fluid-rendezvous", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def server_bind(self) -> None:
        # The method of HTTPServer looks up the machine's name, which can take seconds.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore it: a member has died in the middle of a request."""

    def call_off(self) -> None:
        """From now on every key has the empty value, which is no address, so that all initialisations fail at once."""
        with self.changed:
            self._off = True
            self.changed.notify_all()

    def value(self, path: str) -> bytes | None:
        return b"" if self._off else self.values.get(path)

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Rendezvous
    timeout = 5.0

    def do_GET(self) -> None:
        deadline = time.monotonic() + HOLD_S
        with self.server.changed:
            while (value := self.server.value(self.path)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self.server.changed.wait(left)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or int(size) > VALUE_SIZE:
            self.close_connection = True
            self._answer(413)
            return
        value = self.rfile.read(int(size))
        with self.server.changed:
            self.server.values[self.path] = value
            self.server.changed.notify_all()
        self._answer(200)

    def do_DELETE(self) -> None:
        self._answer(200)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
