"""Kills worker processes that do not answer; one that is a client of MPS is ended under its daemon before.

That happens on the worker's node, in a task of Ray's, and nobody waits for it but the end of the job.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fluidtune.cluster.device_source import DeviceSource
from fluidtune.cluster.new_processes import PooledWorker
from salus_share.mps import ANSWER_S, end_client

#: Seconds that the end of the job waits until all have been killed. A daemon is asked twice, and a process that asks it
#: takes a few seconds to start.
FINISH_S = 3 * ANSWER_S


class Killing:
    """Belongs to one pool of workers on ``devices``."""

    def __init__(self, devices: DeviceSource) -> None:
        self._devices = devices
        #: The tasks that end clients of MPS, each with its worker.
        self._under_way: dict[Any, PooledWorker] = {}

    def kill(self, worker: PooledWorker) -> None:
        """Kill the worker: at once, or when its daemon has dropped what it computes.

        A process that is starting computes nothing yet.
        """
        node = _whole(self._devices.nodes.get(worker.device)) if worker.mps and worker.pid is not None else None
        if node is None:
            ray.kill(worker.actor)
            return
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(_end_and_kill).options(num_cpus=0, scheduling_strategy=there)
        self._under_way[task.remote(worker.pid, worker.actor)] = worker

    def finish(self) -> None:
        """Wait until all have been killed, and kill those at once that have not."""
        if self._under_way:
            ray.wait(list(self._under_way), num_returns=len(self._under_way), timeout=FINISH_S)
        for worker in self._under_way.values():
            ray.kill(worker.actor)
        self._under_way.clear()


def _whole(node: str | None) -> str | None:
    """The id of a living node that begins so."""
    found = (each["NodeID"] for each in ray.nodes() if each.get("Alive", True))
    return None if node is None else next((each for each in found if each.startswith(node)), None)


def _end_and_kill(pid: int, actor: Any) -> None:
    with suppress(OSError):
        end_client(pid)
    ray.kill(actor)
