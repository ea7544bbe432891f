"""`benchmarks.serve_http`: its client sends every request and counts what became of it.

No figure that is measured is asserted.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.serve_http_client import Client
from benchmarks.serve_real import Load

#: Seconds; the door answers at once.
SLO_S = 60.0


class Door(ThreadingHTTPServer):
    """Answers every third request with 503, and the others with 7; ``answered`` counts these."""

    request_queue_size = 256  # More than the clients of the closed loop.

    def __init__(self):
        self.asked = self.answered = 0
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    def status(self):
        with self._lock:
            self.asked += 1
            self.answered += self.asked % 3 != 0
            return 200 if self.asked % 3 else 503


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        image = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert len(image) == 8
        self.send_response(self.server.status())
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"7")

    def log_message(self, *said):
        pass


@pytest.fixture
def door():
    with Door() as door:
        threading.Thread(target=door.serve_forever, daemon=True).start()
        yield door
        door.shutdown()


def a_client(door, expected=7):
    return Client(door.server_port, [expected] * 64, SLO_S, "eager")


@pytest.mark.slow
@pytest.mark.serve
class TestClient:
    def test_the_open_load_is_counted(self, door):
        found = a_client(door).open(Load(200.0, 1.0, 0.3, 1))
        assert door.asked > 0
        assert found["good"] + found["late"] == pytest.approx(door.answered / door.asked, abs=1e-3)
        assert found["refused"] == pytest.approx(1 - door.answered / door.asked, abs=1e-3)
        assert found["failed"] == 0
        assert found["p99_ms"] > 0 and found["refused_p99_ms"] > 0

    def test_an_answer_that_is_not_the_models_ends_the_benchmark(self, door):
        with pytest.raises(RuntimeError, match="is not that of the model, 8"):
            a_client(door, 8).open(Load(200.0, 1.0, 0.1, 1))
