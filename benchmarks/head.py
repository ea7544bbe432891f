"""A Ray cluster of one node in a separate process, for several jobs that share it.

Only processes with the environment that `head` yields can connect: the cluster asks for a token that is in it.
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
    """A running cluster.

    ``address``: for ``ray.init``. ``environment``: for every process that connects. ``pid``: of the head's driver.
    """

    address: str
    environment: Mapping[str, str]
    pid: int


@contextmanager
def head(**resources: float) -> Iterator[Head]:
    """A cluster for the time of the ``with`` block. Raises RuntimeError if it does not start.

    ``resources``: ``num_cpus`` and ``num_gpus`` of the node; Ray does not check that the machine has them.
    """
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
