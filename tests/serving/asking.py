"""How a test asks a service: over HTTP, and by the words of the command."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import ray

from benchmarks.common import ROOT

#: Seconds until a test gives up. Longer than any SLO of the tests.
PATIENCE_S = 250.0


def asked(
    served: Any, value: Any, path: str = "", method: str = "POST", headers: Mapping[str, str] | None = None
) -> tuple[int, Any, Mapping[str, str]]:
    """The status, the value and the headers of an answer. value: texts and bytes are sent as they are."""
    url = urlsplit(served.url)
    body = value if isinstance(value, str | bytes) else json.dumps(value)
    with contextlib.closing(http.client.HTTPConnection(url.hostname, url.port, timeout=PATIENCE_S)) as connection:
        connection.request(method, f"/{path}", body, dict(headers or {}))
        answer = connection.getresponse()
        text = answer.read()
    return answer.status, json.loads(text) if text else None, answer.headers


def ask(served: Any, value: Any, path: str = "", method: str = "POST") -> tuple[int, Any]:
    """The status and the value of an answer."""
    return asked(served, value, path, method)[:2]


def command(*words: str) -> tuple[int, str]:
    """The exit status of `fluidtune serve` with these words, in this process' cluster; and what it says."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "fluidtune", "serve", "--address", address, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT)
    return done.returncode, done.stdout or done.stderr
