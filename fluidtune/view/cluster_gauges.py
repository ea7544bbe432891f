"""The leases and the rho of the cluster's apps, from the gauges that the arbiter has at Ray's own metrics addresses.

Ray writes these addresses into a file of the head node, for Prometheus. So nothing connects to the Ray cluster. Where
Ray was installed without its dashboard (`ray[default]`) there is no such file, and on other nodes neither.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.request
from http.client import HTTPException
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


def _asked(address: str) -> str:
    """The metrics at ``address``, as text; empty if there are none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/metrics", timeout=ANSWER_S) as answer:
            return str(answer.read(MOST_BYTES).decode(errors="replace"))
    except (OSError, ValueError, HTTPException):  # what listens there may be no HTTP server
        return ""


def apps_of(text: str) -> list[dict[str, Any]]:
    """The apps in Prometheus' text format."""
    found: dict[str, dict[str, Any]] = {}
    for gauge, app, value in _LINE.findall(text):
        row = found.setdefault(app, {"app": app, "leases": 0, "rho": None})
        row[gauge] = float(value)
    return [found[app] for app in sorted(found)]
