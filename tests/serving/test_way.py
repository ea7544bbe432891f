"""The measured way through the front door, against a door of the test."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fluidtune.serving import way as ways
from fluidtune.serving.way import RECENT, Way
from tests.serve.driving import PATIENCE_S, until


class Door(ThreadingHTTPServer):
    """Answers each request with the next of ``statuses``, then with 200, when ``open`` is set."""

    daemon_threads = True

    def __init__(self, statuses=()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses, self.asked, self.open = list(statuses), 0, threading.Event()
        self.open.set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        assert self.path == ways.PATH
        assert self.rfile.read(int(self.headers["Content-Length"])) == b"[1]"
        self.server.asked += 1
        self.server.open.wait(PATIENCE_S)
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def door(monkeypatch):
    monkeypatch.setattr(ways, "EVERY_S", 0.001)
    monkeypatch.setattr(ways, "LOOK_S", 0.001)
    with Door() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.open.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def way(door):
    ends = threading.Event()
    yield Way("127.0.0.1", door.server_port, "[1]", ends)
    ends.set()


def ask(way, door, times=2 * RECENT):
    """Let requests pass until the door was asked so many times more."""
    before = door.asked

    def enough():
        way.passed()
        return door.asked >= before + times

    until(enough)


def test_the_door_is_waited_for(door, way):
    door.statuses[:] = [404, 500]
    assert way.seconds == way.least == 0.0
    way.first()
    assert door.asked == 3 + ways.FIRST
    assert 0.0 < way.least <= way.seconds


def test_nobody_waits_for_a_door_when_the_service_ends(door, way):
    way._ends.set()
    way.first()
    assert (door.asked, way.seconds) == (0, 0.0)


def test_a_way_that_has_become_long_is_known_before_its_answer_comes_and_is_forgotten_again(door, way):
    way.first()
    way.watch()
    ask(way, door)
    idle = way.seconds
    door.open.clear()
    way.passed()
    until(lambda: way.seconds > idle + 0.5)
    door.open.set()
    until(lambda: max(way._recent) > 0.5)

    def forgotten():
        ask(way, door)
        return way.least <= way.seconds < 0.5

    until(forgotten)


def test_without_requests_the_way_is_measured_no_more_than_counts(door, way):
    way.first()
    before = door.asked
    way.watch()
    until(lambda: door.asked == before + RECENT)
    time.sleep(100 * ways.EVERY_S)
    assert door.asked == before + RECENT
    way.passed()
    until(lambda: door.asked == before + 2 * RECENT + 1)


def test_a_door_that_is_shut_tells_nothing_about_the_way():
    with Door() as server:
        port = server.server_port
    shut = Way("127.0.0.1", port, "[1]", threading.Event())
    connection = shut._connection()
    assert shut._ask(connection) is None


def test_a_request_that_is_given_up_is_a_way_of_that_length(door, way, monkeypatch):
    monkeypatch.setattr(ways, "TIMEOUT_S", 0.2)
    door.open.clear()
    assert way._ask(way._connection()) >= 0.2
