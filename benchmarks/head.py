"""A Ray cluster of one node in a process of its own, for jobs that share it.

Only processes with the environment that `head` returns can connect: where Ray asks for a token, it has one of its own.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.common import environment, kill_tree

_SCRIPT = """
import json, sys, ray
found = ray.init(address="local", include_dashboard=False, log_to_driver=False, **json.loads(sys.argv[1]))
print("address", found.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


@dataclass(frozen=True)
class Head:
    """``address``: for ``ray.init``. ``environment``: of every process that connects. ``pid``: of the head's driver."""

    address: str
    environment: Mapping[str, str]
    pid: int


@contextmanager
def head(**resources: float) -> Iterator[Head]:
    """``resources``: ``num_cpus`` and ``num_gpus`` that Ray is to believe in. RuntimeError if it does not come up."""
    settings = {**environment(), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, json.dumps(resources)],
        env=settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        address = ""
        for line in process.stdout:
            if line.startswith("address "):
                address = line.split()[1]
                break
        if not address:
            raise RuntimeError("Ray did not start")
        yield Head(address, settings, process.pid)
        process.stdin.close()
        process.wait(30)
    finally:
        kill_tree(process)
