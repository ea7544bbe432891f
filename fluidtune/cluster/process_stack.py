"""Where a process stands: it writes the stacks of its threads when it gets a signal, whatever it computes or waits for.

Python's own `faulthandler` writes them, into memory of the process that others of its user find under /proc.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from contextlib import suppress

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

#: No library that is known here uses it. Judgement.
_SIGNAL = signal.SIGRTMIN + 5 if sys.platform == "linux" else None
_NAME = "fluidtune-stack"
#: Seconds within which a process has written; and the most characters of it that are shown.
_WRITES_S, _MOST = 1.0, 8000


def watch() -> None:
    """This process writes its stacks from now on when it is asked. Does nothing where there is no /proc."""
    if _SIGNAL is not None:
        faulthandler.register(_SIGNAL, file=os.memfd_create(_NAME), all_threads=True, chain=False)


def stack_of(pid: int) -> str:
    """The stacks of a process of this machine, innermost frame first; empty: it has none to show."""
    if _SIGNAL is None:
        return ""
    folder, found = f"/proc/{pid}/fd", ""
    with suppress(OSError):
        for name in os.listdir(folder):
            if not os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_NAME}"):
                continue
            with open(f"{folder}/{name}", "rb", buffering=0) as file:
                file.seek(0, os.SEEK_END)
                os.kill(pid, _SIGNAL)
                ends = time.monotonic() + _WRITES_S
                more = b""
                while time.monotonic() < ends and (more or not found):
                    time.sleep(0.02)
                    more = file.read()
                    found += more.decode(errors="replace")
            return found[:_MOST].strip()
    return found


def asked_on(node: str, pid: int) -> object:
    """The future of `stack_of` a process on that node (its whole id)."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(stack_of).options(num_cpus=0, scheduling_strategy=there, max_retries=0).remote(pid)
