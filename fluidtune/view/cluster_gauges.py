"""The leases and the rho of the cluster's apps, from the gauges that the arbiter has at Ray's own metrics addresses.

Ray writes these addresses into a file of the head node, for Prometheus. So nothing connects to the Ray cluster. Where
Ray was installed without its dashboard (`ray[default]`) there is no such file, and on other nodes neither.
"""

from __future__ import annotations

import io
import json
import os
import re
import socket
import threading
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

#: The file, in Ray's folder for temporary files. Source: "Using Prometheus" in Ray's page on collecting metrics.
DISCOVERY = "prom_metrics_service_discovery.json"
#: Seconds that an answer is used, and that one address may take. The arbiter sets its gauges once a second.
FRESH_S, ANSWER_S = 4.0, 1.0
#: Of a large cluster this many addresses are asked at a time, one after the other.
ASKED = 8
#: Bytes of an answer that are read: the metrics of a node with thousands of workers are less.
MOST_BYTES = 1 << 24
#: A line of Prometheus' text format: `ray_themis_rho{app="a",...} 1.2`.
_LINE = re.compile(r'^ray_themis_(rho|leases)\{(?:.*,)?app="((?:[^"\\]|\\.)*)".*\} (\S+)', re.MULTILINE)


class ClusterGauges:
    """Asks the addresses that Ray's file names. ``folder``: Ray's folder for temporary files; None: its usual one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = (folder or Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray")) / DISCOVERY
        self._lock = threading.Lock()
        self._until = 0.0
        self._known: list[dict[str, Any]] = []
        #: The address that had the arbiter's gauges; "" if none had. And those that are asked next.
        self._its = ""
        self._turn: list[str] = []

    def apps(self) -> list[dict[str, Any]]:
        """Each app's "app", "leases" and "rho" (None: not known), by name; none where no arbiter is seen."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._known = self._ask(self._addresses())
                self._until = time.monotonic() + FRESH_S
            return self._known

    def _ask(self, addresses: list[str]) -> list[dict[str, Any]]:
        """The arbiter is one process. The address that has had its gauges is asked, otherwise the next few of all."""
        if self._its in addresses:
            turn = [self._its]
        else:
            left = [each for each in self._turn if each in addresses] or addresses
            turn, self._turn = left[:ASKED], left[ASKED:]
        for address in turn:
            if apps := apps_of(_asked(address)):
                self._its = address
                return apps
        self._its = ""
        return []

    def _addresses(self) -> list[str]:
        try:
            # Any user may make files in /tmp. Those of others do not tell us whom to ask.
            if self._file.stat().st_uid not in (os.getuid(), 0):
                return []
            groups = json.loads(self._file.read_text())
            return [str(address) for group in groups for address in group["targets"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []


class _TimedAnswer(io.RawIOBase):
    """What comes over a connection until ``until`` (monotonic seconds). After that reading it raises TimeoutError.

    The timeout of a socket alone holds for each of its pieces anew.
    """

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self._until = connection, until

    def makefile(self, mode: str) -> io.BufferedReader:
        """As of a socket: `HTTPResponse` reads from what this returns."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(room)


def _asked(address: str) -> str:
    """The metrics at ``address``, as text; empty if there are none."""
    until = time.monotonic() + ANSWER_S
    try:
        with closing(HTTPConnection(address, timeout=ANSWER_S)) as connection:
            connection.request("GET", "/metrics", headers={"Connection": "close"})
            with HTTPResponse(_TimedAnswer(connection.sock, until)) as answer:  # type: ignore[arg-type]
                answer.begin()
                return answer.read(MOST_BYTES).decode(errors="replace") if answer.status == 200 else ""
    except (OSError, ValueError, HTTPException):  # what listens there may be no HTTP server
        return ""


def apps_of(text: str) -> list[dict[str, Any]]:
    """The apps in Prometheus' text format. A value that is no number is passed over."""
    found: dict[str, dict[str, Any]] = {}
    for gauge, app, text_of_value in _LINE.findall(text):
        try:
            value = float(text_of_value)
        except ValueError:
            continue
        found.setdefault(app, {"app": app, "leases": 0, "rho": None})[gauge] = value
    return [found[app] for app in sorted(found)]
