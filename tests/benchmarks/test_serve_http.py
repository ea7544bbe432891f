"""`benchmarks.serve_http`: its client sends every request and counts what became of it; what becomes of the figures.

No figure that is measured is asserted.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks import serve_http_client
from benchmarks.serve_http import compared, medians
from benchmarks.serve_http_client import Client, Clients
from benchmarks.serve_http_sides import Setting
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

    def test_a_process_of_its_own_counts_the_same(self, door):
        with Clients([7] * 64, SLO_S) as clients:
            found = clients.open(door.server_port, Load(200.0, 1.0, 0.3, 1), "eager")
            assert found["refused"] == pytest.approx(1 - door.answered / door.asked, abs=1e-3)
            asked = door.asked
            assert clients.closed(door.server_port, 0.1, "eager") > 0
            assert door.asked > asked

    def test_the_closed_load_counts_every_answer(self, door, monkeypatch):
        monkeypatch.setattr(serve_http_client, "CLIENTS", 8)
        rate = a_client(door).closed(0.3)
        assert rate * 0.3 == pytest.approx(door.answered)

    def test_an_answer_that_is_not_the_models_ends_the_benchmark(self, door):
        with pytest.raises(RuntimeError, match="is not that of the model, 8"):
            a_client(door, 8).open(Load(200.0, 1.0, 0.1, 1))


def row(goodput, p99=400.0, refused=None):
    return {"goodput": goodput, "p99_ms": p99, "refused_p99_ms": refused}


def test_medians_over_the_repeats_and_the_better_setting_counts():
    good, lucky = Setting(8, 0.0, 1), Setting(16, 0.0, None)
    turns = [
        {("poisson", "1", good): row(60.0, 450.0), ("poisson", "1", lucky): row(90.0)},
        {("poisson", "1", good): row(62.0, None, 20.0), ("poisson", "1", lucky): row(30.0)},
        {("poisson", "1", good): row(64.0, 600.0, 700.0), ("poisson", "1", lucky): row(31.0)},
    ]
    found = medians(turns, 500.0)["poisson"]["1"]
    assert (found["goodput"], found["p99_ms"], found["refused_p99_ms"]) == (62.0, 525.0, 360.0)
    assert found["setting"] == {"size": 8, "wait_s": 0.0, "limit": 1}
    assert found["within_slo"] == {"answers": False, "refusals": True}
    assert [one["goodput"] for one in found["all"]] == [60.0, 62.0, 64.0]


def test_each_of_our_sides_is_compared_with_each_rival_by_arrivals_and_load():
    rows = {"eager": 90.0, "serve_batch": 60.0, "litserve": 0.0}
    sides = {side: medians([{("poisson", "1", None): row(goodput)}], 500.0) for side, goodput in rows.items()}
    ratios = {"serve_batch": {"poisson": {"1": 1.5}}, "litserve": {"poisson": {"1": 90.0}}}
    assert compared(sides) == {"eager": ratios}
