"""The pool of warm workers: which process serves which trial next.

A worker belongs to one device for its whole life. It is taken by a trial, given back, cleaned by itself, and
taken again; one that cannot be cleaned, or that died, is replaced by a new process when the device is needed
next. Workers are started when they are first needed and never before, and of one node no more at a time than it has
cores: sixteen that start together on two cores are all there after the time of eight, and two by two the first
train while the last ones wait.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fluidtune.cluster.device_source import DeviceSource
from fluidtune.cluster.devices import Layout
from fluidtune.cluster.mps import MpsSettings
from fluidtune.cluster.worker import DEVICE_VARIABLE, Worker
from fluidtune.ray_compat.trainable import ENV_VARS_TO_PROPAGATE

logger = logging.getLogger(__name__)

#: A worker that cleans up is waited for so long before another process is started, seconds.
CLEAN_SOON_S = 1.0
#: Processes that may start at a time on a node that says it has fewer cores: one waits while another computes.
STARTS_AT_LEAST = 2
#: Environment that stock Tune gives its trial processes and that user code may rely on.
_PASSED_ON = {*ENV_VARS_TO_PROPAGATE, "TUNE_FUNCTION_THREAD_TIMEOUT_S"}


@dataclass
class PooledWorker:
    """One worker process, as the driver knows it."""

    name: str
    device: int
    actor: Any
    #: Unix time at which it was asked for; for the event log.
    asked: float
    #: It was started to see several GPUs, for one trial, and is not kept.
    exclusive: bool = False
    pid: int | None = None
    gpus: list[str] = field(default_factory=list)
    #: It is a client of its GPU's MPS daemon.
    mps: bool = False
    #: Its process has not answered yet.
    starting: bool = True
    #: Set while it serves or cleans up; an idle worker is in the pool.
    busy: bool = True
    #: When it was told to clean up (monotonic clock); None before and after.
    cleaning: float | None = None


class WorkerPool:
    """Workers by device. Callers say which device and get a worker; which process that is, is decided here.

    ``mps``: how the processes of one GPU share it under MPS, None: without.
    """

    def __init__(self, plan: Layout, devices: DeviceSource, job: str, mps: MpsSettings | None = None):
        self._layout = plan
        self._devices = devices
        self._job = job
        self._mps = mps
        self._count = 0
        self._idle: dict[int, list[PooledWorker]] = defaultdict(list)
        #: Every living worker by name.
        self.workers: dict[str, PooledWorker] = {}
        #: By node, how many of its processes may start at a time.
        self._starts: dict[str, int] = {}
        environment = {k: v for k in _PASSED_ON if (v := os.environ.get(k)) is not None}
        environment.setdefault("PL_DISABLE_FORK", "1")
        self._environment = environment

    def idle(self, device: int) -> bool:
        return bool(self._idle[device])

    def ready(self, device: int, alone: bool = False) -> bool:
        """Whether `take` can serve now: a worker is idle, or there is room for one more process, which may start.

        A worker that is still cleaning up after a trial keeps its room; ``alone``: the device must be empty of
        busy ones.
        """
        busy = sum(1 for w in self.workers.values() if w.device == device and w.busy)
        if alone:
            return busy == 0 and not self._crowded(device)
        if self._idle[device]:
            return True
        # One that is about to be free is there sooner than a new process.
        soon = any(
            w.device == device and w.cleaning is not None and time.monotonic() - w.cleaning < CLEAN_SOON_S
            for w in self.workers.values()
        )
        return not soon and busy < self._layout.packing and not self._crowded(device)

    def _crowded(self, device: int) -> bool:
        """Whether as many processes start on the device's node as may at a time."""
        nodes = self._devices.nodes
        node = nodes.get(device)
        if node is None:
            return False  # whoever starts there will hear so
        if node not in self._starts:
            found = [each["Resources"] for each in ray.nodes() if each["NodeID"].startswith(node)]
            self._starts[node] = max([STARTS_AT_LEAST, *(int(each.get("CPU", 0)) for each in found)])
        starting = sum(1 for w in self.workers.values() if w.starting and nodes.get(w.device) == node)
        return starting >= self._starts[node]

    def take(self, device: int, now: float, visible: list[str] | None = None) -> PooledWorker:
        """A worker of this device, warm if there is one. Only when the device is `ready`.

        ``visible``: ids of all GPUs that the worker must see (a trial over several GPUs); such a worker is
        started for it, because CUDA reads them once.
        """
        idle = self._idle[device]
        if idle and visible is None:
            worker = idle.pop()
            worker.busy, worker.cleaning = True, None
            return worker
        for spare in idle:
            # Its device is wanted whole by another kind of worker.
            self.discard(spare)
        idle.clear()
        return self._start(device, now, visible)

    def _start(self, device: int, now: float, visible: list[str] | None) -> PooledWorker:
        self._count += 1
        name = f"{self._job}-{device}-{self._count}"
        resources = dict(self._layout.worker)
        environment = {**self._environment, DEVICE_VARIABLE: str(device)}
        if visible is not None:
            resources["GPU"] = 1.0
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        actor = (
            ray.remote(Worker)
            .options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                memory=resources.pop("memory", None),
                resources=resources or None,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._devices.group(device), placement_group_bundle_index=0
                ),
            )
            .remote(name, environment, self._mps if visible is None else None)
        )
        worker = PooledWorker(name, device, actor, now, exclusive=visible is not None)
        self.workers[name] = worker
        return worker

    def give_back(self, worker: PooledWorker) -> None:
        """The worker is clean and free."""
        if worker.name not in self.workers:
            return
        worker.busy, worker.cleaning = False, None
        if worker.exclusive:
            self.discard(worker)
        else:
            self._idle[worker.device].append(worker)

    def discard(self, worker: PooledWorker) -> None:
        """Kill a worker, or forget one that died."""
        self.workers.pop(worker.name, None)
        if worker in self._idle[worker.device]:
            self._idle[worker.device].remove(worker)
        ray.kill(worker.actor)

    def busy(self, device: int) -> bool:
        """Whether a worker of the device serves a trial or cleans up after one."""
        return any(worker.device == device and worker.busy for worker in self.workers.values())

    def clear(self, device: int) -> None:
        """The device is gone, or its idle workers are of no use. Those of a trial tell of their death by themselves."""
        for worker in list(self._idle[device]):
            self.discard(worker)

    def close(self) -> None:
        for worker in list(self.workers.values()):
            self.discard(worker)
