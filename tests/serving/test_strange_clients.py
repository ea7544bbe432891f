"""Clients that ask too much at once, hang up, or send large inputs."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

import fluidtune
from benchmarks.common import free_ports
from tests.serve.driving import until
from tests.serving.asking import ask

pytestmark = [pytest.mark.ray, pytest.mark.newest, pytest.mark.serve]

#: Seconds: that each input takes, and the SLO. Many more requests come at once than an SLO has place for.
EACH_S, SLO_S = 0.2, 5.0
CLIENTS = 100


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
