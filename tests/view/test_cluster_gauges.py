"""The apps of the cluster, from an address that answers as Ray's does."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fluidtune.view import cluster_gauges
from fluidtune.view.cluster_gauges import ANSWER_S, ASKED, DISCOVERY, ClusterGauges, apps_of

TEXT = """# HELP ray_themis_rho Finish-time fairness of an app
# TYPE ray_themis_rho gauge
ray_themis_rho{Component="core_worker",NodeAddress="1.2.3.4",app="b"} 1.25
ray_themis_rho{app="a \\" }",Component="core_worker"} 0.5
ray_themis_leases{Version="2.51",app="b"} 3.0
ray_themis_leases{app="idle"} 0.0
ray_themis_utilisation{} 0.75
ray_fluidtune_devices_busy{app="x"} 2.0
"""
APPS = [
    {"app": 'a \\" }', "leases": 0, "rho": 0.5},
    {"app": "b", "leases": 3.0, "rho": 1.25},
    {"app": "idle", "leases": 0.0, "rho": None},
]


def test_the_text_format() -> None:
    assert apps_of(TEXT) == APPS
    assert apps_of("") == apps_of("ray_themis_rho 1\n<html>") == []
    odd = 'ray_themis_rho{app="a"} abc\n'  # Seen: a traceback at each look
    assert apps_of(odd) == [] and apps_of(odd + TEXT) == APPS


class Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(TEXT.encode())

    def log_message(self, *args: object) -> None:
        pass


def test_the_addresses_are_those_of_rays_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            targets = [*("127.0.0.1:1" for _ in range(ASKED)), f"127.0.0.1:{server.server_port}"]
            file = tmp_path / DISCOVERY
            file.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": targets}]))
            monkeypatch.setattr(cluster_gauges, "FRESH_S", 0.0)
            gauges = ClusterGauges(tmp_path)
            assert [gauges.apps() for _ in range(3)] == [[], APPS, APPS]  # the last address is asked next
            owner = os.getuid() + 1
            monkeypatch.setattr(os, "getuid", lambda: owner)
            assert bool(gauges.apps()) is (owner == 1)  # root's file is asked by anybody
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"targets": 3}]', '{"targets": []}'])
def test_a_file_that_says_nothing(text: str, tmp_path: Path) -> None:
    assert ClusterGauges(tmp_path).apps() == []
    (tmp_path / DISCOVERY).write_text(text)
    assert ClusterGauges(tmp_path).apps() == []


def test_what_is_no_http_server_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's file outlives its cluster, and another server may have got the port. Seen: a traceback at each look."""
    monkeypatch.setattr(cluster_gauges, "FRESH_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other, HTTPServer(("127.0.0.1", 0), Metrics) as server:

        def greet() -> None:
            asked, _ = other.accept()
            asked.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            asked.close()

        threads = [threading.Thread(target=each) for each in (greet, server.handle_request)]
        for thread in threads:
            thread.start()
        targets = [f"127.0.0.1:{each}" for each in (other.getsockname()[1], server.server_port)]
        (tmp_path / DISCOVERY).write_text(json.dumps([{"labels": {}, "targets": targets}]))
        assert ClusterGauges(tmp_path).apps() == APPS
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nServer", b""])
def test_an_answer_that_never_ends_is_given_up(head: bytes, tmp_path: Path) -> None:
    """Whether it stops in its head or in its body. Seen: `fluidtune view` hung."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as other:

        def drip() -> None:
            asked, _ = other.accept()
            with asked, contextlib.suppress(OSError):
                asked.sendall(head)
                while not ended.wait(ANSWER_S / 4):
                    asked.sendall(b": ")

        thread = threading.Thread(target=drip)
        thread.start()
        targets = [f"127.0.0.1:{other.getsockname()[1]}"]
        (tmp_path / DISCOVERY).write_text(json.dumps([{"labels": {}, "targets": targets}]))
        # What never ends would go on until the thread does.
        most = threading.Timer(5 * ANSWER_S, ended.set)
        most.start()
        began = time.monotonic()
        apps, took = ClusterGauges(tmp_path).apps(), time.monotonic() - began
        ended.set()
        for each in (most, thread):
            most.cancel()
            each.join()
    assert apps == [] and took < 2 * ANSWER_S
