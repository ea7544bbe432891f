"""The front door under strain: bodies that never end, large wrong ones, and a stop under load."""

from __future__ import annotations

import http.client
import select
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from urllib.parse import urlsplit

import psutil
import pytest

import fluidtune
from benchmarks.common import free_ports
from fluidtune.report import read_events
from fluidtune.serving import capacity
from tests.serving.asking import ask
from tests.serving.runs import load

pytestmark = [pytest.mark.ray, pytest.mark.newest, pytest.mark.serve]

#: Seconds: of the SLO, and until a test gives up. HALVES: bodies that never end.
SLO_S, PATIENCE_S = 3.0, 100.0
HALVES, CLIENTS = 50, 4
#: Wrong bodies, bytes of each, and those that the front may need more than before: the texts that `intake.MOST_BYTES`
#: allows, and one body as numbers, which take four times the bytes of their text. All bodies as numbers are more.
LARGE, BYTES, MOST_MORE = 20, 14_000_000, 400 << 20


@pytest.fixture(scope="module")
def served(finished):
    served = fluidtune.serve(finished, load, SLO_S, max_body=16 << 20, port=free_ports(1)[0])
    yield served
    served.stop()


def test_half_bodies_are_closed_at_the_slo_and_keep_nobody_waiting(served):
    url = urlsplit(served.url)
    halves = [socket.create_connection((url.hostname, url.port)) for _ in range(HALVES)]
    try:
        for half in halves:
            half.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n5")
        answered = sum(ask(served, 5)[0] == 200 for _ in range(20))
        assert answered
        said, until = dict.fromkeys(halves, b""), time.monotonic() + PATIENCE_S
        while halves:
            assert time.monotonic() < until, "a half body is still open"
            for half in select.select(halves, [], [], 1.0)[0]:
                more = half.recv(10_000)
                said[half] += more
                if not more:
                    halves.remove(half)
                    half.close()
    finally:
        for half in halves:
            half.close()
    assert Counter(one.split(b"\r\n")[0] for one in said.values()) == {b"HTTP/1.1 503 Service Unavailable": HALVES}
    assert all(b"body_late" in one and b"retry-after: 3" in one for one in said.values())
    requests = served.status()["trials"][0]["requests"]
    assert sum(count for what, count in requests.items() if what.startswith("refused")) >= HALVES


def test_large_wrong_bodies_keep_nobody_waiting_and_take_bounded_memory(served):
    front, wrong, answered = psutil.Process(served.status()["pid"]), b"[" + b"0.1234, " * (BYTES // 8) + b"1]", []
    before = most = front.memory_info().rss
    with ThreadPoolExecutor(LARGE) as others:
        wrongs = [others.submit(ask, served, wrong) for _ in range(LARGE)]
        while wait(wrongs, timeout=0.1).not_done or not answered:
            answered.append(ask(served, 5)[0])
            most = max(most, front.memory_info().rss)
    assert {one.result()[0] for one in wrongs} <= {400, 503} and 200 in answered
    assert set(answered) <= {200, 503} and most - before < MOST_MORE


def test_a_stop_answers_503_until_the_port_is_closed(served, finished):
    """After the last answer there is a closed port, and never a 404."""
    became, ends = [], threading.Event()

    def client():
        while not ends.is_set():
            try:
                became.append(ask(served, 5)[0])
            except (OSError, http.client.HTTPException) as error:
                became.append(type(error).__name__)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        until = time.monotonic() + PATIENCE_S
        while became.count(200) < 20:
            assert time.monotonic() < until
            time.sleep(0.01)
        served.stop()
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    counts = Counter(became)
    assert set(counts) <= {200, 503, "ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected"}, counts
    assert counts["ConnectionRefusedError"]
    lost = counts["ConnectionResetError"] + counts["RemoteDisconnected"]
    assert lost <= 2 * CLIENTS, "only whoever was on the way, or about to be let in"
    assert read_events(finished / "serving" / "fluid_events.jsonl")[-1]["event"] == "serving_ended"
    assert [one.name for one in capacity.models_of(str(finished), SLO_S, "eager")] == served.trials
