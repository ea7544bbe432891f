"""Clients that ask too much at once, hang up, or send bodies that never end or are large and wrong; and a stop."""

from __future__ import annotations

import http.client
import json
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
from tests.serve.driving import PATIENCE_S, until
from tests.serving.asking import ask

pytestmark = [pytest.mark.ray, pytest.mark.newest, pytest.mark.serve]

#: Seconds: that each input takes, and the SLO. Many more requests come at once than an SLO has place for.
EACH_S, SLO_S = 0.2, 5.0
CLIENTS = 100
#: Bodies that never end, and clients that ask while the service stops.
HALVES, ASKING = 50, 4
#: Wrong bodies, bytes of each, and those that the front may need more than before: the texts that `intake.MOST_BYTES`
#: allows, and one body as numbers, which take four times the bytes of their text. All bodies as numbers are more.
LARGE, BYTES, MOST_MORE = 20, 14_000_000, 400 << 20


def load(directory, config):
    """Takes `EACH_S` for each input, and answers its name, how many values it has, and all names that were run."""
    ran = []

    def slow(inputs):
        time.sleep(EACH_S * len(inputs))
        ran.extend(one["name"] for one in inputs)
        return [[one["name"], len(one["values"]), ran] for one in inputs]

    slow.samples = [{"name": "", "values": []}, {"name": "", "values": [0.5]}]
    return slow


@pytest.fixture(scope="module")
def served(finished):
    with fluidtune.serve(finished, load, SLO_S, max_batch=2, max_body=16 << 20, port=free_ports(1)[0]) as served:
        yield served


def named(name):
    return {"name": name, "values": []}


def counted(served):
    """What became of the requests, when none waits any more."""
    found = until(lambda: (found := served.status())["unanswered"] == 0 and found)
    return Counter(found["trials"][0]["requests"])


def test_whoever_asks_too_much_is_answered_or_refused_once_with_a_reason(served):
    before = counted(served)

    def one(number):
        status, said = ask(served, named(f"many-{number}"))
        assert said[0] == f"many-{number}" if status == 200 else said["error"] == "refused" and said["reason"], said
        return status

    with ThreadPoolExecutor(CLIENTS) as threads:
        became = Counter(threads.map(one, range(CLIENTS)))
    assert became.keys() == {200, 503}
    after = counted(served) - before
    assert after["answered"] == became[200]
    assert sum(count for what, count in after.items() if what == "late" or what.startswith("refused")) == became[503]
    assert ask(served, named("after"))[0] == 200


def test_what_a_client_that_has_hung_up_asked_for_is_not_run(served):
    """What was sent to the device before is run. So clients hang up again and again, until it was soon enough once."""
    before, host = counted(served), urlsplit(served.url)
    asked, ran = set(), set()
    for number in range(20):
        clients = [socket.create_connection((host.hostname, host.port)) for _ in range(6)]
        for place, client in enumerate(clients):
            text = json.dumps(named(f"gone-{number}-{place}"))
            client.sendall(f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            asked.add(f"gone-{number}-{place}")
        time.sleep(EACH_S)
        for client in clients:
            client.close()
        after = counted(served) - before
        status, (_, _, names) = ask(served, named("still"))
        assert status == 200
        ran = asked.intersection(names)
        if ran < asked:
            break
    assert 0 < len(asked - ran) <= after["cancelled"]


def test_a_client_that_hangs_up_within_its_request_harms_nobody(served):
    before, host = counted(served), urlsplit(served.url)
    for head in ("Content-Length: 1000\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n5\r\n{", "Content-Le", ""):
        with socket.create_connection((host.hostname, host.port)) as client:
            client.sendall(f"POST / HTTP/1.1\r\nHost: x\r\n{head}".encode())
    assert ask(served, named("whole"))[0] == 200
    assert (counted(served) - before).keys() <= {"answered", "late"}


def test_half_bodies_are_closed_at_the_slo_and_keep_nobody_waiting(served):
    url = urlsplit(served.url)
    halves = [socket.create_connection((url.hostname, url.port)) for _ in range(HALVES)]
    try:
        for half in halves:
            half.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n5")
        answered = sum(ask(served, named(""))[0] == 200 for _ in range(20))
        assert answered
        said, end = dict.fromkeys(halves, b""), time.monotonic() + PATIENCE_S
        while halves:
            assert time.monotonic() < end, "a half body is still open"
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
    assert all(b"body_late" in one and b"retry-after: 5" in one for one in said.values())
    requests = served.status()["trials"][0]["requests"]
    assert sum(count for what, count in requests.items() if what.startswith("refused")) >= HALVES


def test_large_wrong_bodies_keep_nobody_waiting_and_take_bounded_memory(served):
    front, wrong, answered = psutil.Process(served.status()["pid"]), b"[" + b"0.1234, " * (BYTES // 8) + b"1]", []
    before = most = front.memory_info().rss
    with ThreadPoolExecutor(LARGE) as others:
        wrongs = [others.submit(ask, served, wrong) for _ in range(LARGE)]
        while wait(wrongs, timeout=0.1).not_done or not answered:
            answered.append(ask(served, named(""))[0])
            most = max(most, front.memory_info().rss)
    assert {one.result()[0] for one in wrongs} <= {400, 503} and 200 in answered
    assert set(answered) <= {200, 503} and most - before < MOST_MORE


def test_a_stop_answers_503_until_the_port_is_closed(served, finished):
    """After the last answer there is a closed port, and never a 404."""
    became, ends = [], threading.Event()

    def client():
        while not ends.is_set():
            try:
                became.append(ask(served, named(""))[0])
            except (OSError, http.client.HTTPException) as error:
                became.append(type(error).__name__)

    threads = [threading.Thread(target=client) for _ in range(ASKING)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: became.count(200) >= 20)
        served.stop()
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    counts = Counter(became)
    assert set(counts) <= {200, 503, "ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected"}, counts
    assert counts["ConnectionRefusedError"]
    lost = counts["ConnectionResetError"] + counts["RemoteDisconnected"]
    assert lost <= 2 * ASKING, "only whoever was on the way, or about to be let in"
    assert read_events(finished / "serving" / "fluid_events.jsonl")[-1]["event"] == "serving_ended"
    assert [one.name for one in capacity.models_of(str(finished), SLO_S, "eager")] == served.trials
