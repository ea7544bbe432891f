"""One job's worker processes: taken, given back clean, killed when they do not clean up, and what the log says of them.

Which process serves whom is the pool's; here it meets the job's event log and its metrics.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import Any

import ray
from ray.util.metrics import Counter

from fluidtune.cluster.device_source import DeviceSource
from fluidtune.cluster.devices import Layout
from fluidtune.cluster.mps import MpsSettings
from fluidtune.cluster.pool import PooledWorker, WorkerPool
from fluidtune.cluster.worker import Info
from fluidtune.report import EventLog
from fluidtune.tune.gpu_telemetry import GpuNotes

#: A worker of a trial that lost another one is killed when it has not cleaned up within this time, seconds.
CLEAN_BROKEN_S = 30.0


class Workers:
    """Belongs to one `Job`; ``job``: its name."""

    def __init__(
        self, plan: Layout, reservation: DeviceSource, job: str, log: EventLog, gpus: GpuNotes, mps: MpsSettings | None
    ):
        self._on_gpus = plan.kind == "gpu"
        self._pool = WorkerPool(plan, reservation, job, mps)
        self._gpus = gpus
        self._job = job
        self._log = log
        #: By name, when a worker that cleans up is killed (monotonic clock).
        self._watched: dict[str, float] = {}
        self._losses = Counter("fluidtune_workers_lost", "Workers that died", ("job",))

    def ready(self, device: int, others: tuple[int, ...]) -> bool:
        """Whether `take` can serve now."""
        return self._pool.ready(device, alone=bool(others))

    def take(self, device: int, others: tuple[int, ...]) -> tuple[PooledWorker, bool]:
        """A worker of the device; True when it is a new process. ``others``: further GPUs that it must see."""
        warm = self._pool.idle(device) and not others
        visible = None
        if others and self._on_gpus:
            visible = [self._gpu_id(d) for d in (device, *others)]
        return self._pool.take(device, time.time(), visible), not warm

    def _gpu_id(self, device: int) -> str:
        """The id of the GPU that a device's placement group holds, asked of a worker inside it."""
        for worker in self._pool.workers.values():
            if worker.device == device and worker.gpus:
                return worker.gpus[0]
        probe = self._pool.take(device, time.time())
        info: Info = ray.get(probe.actor.info.remote())
        self._pool.discard(probe)
        return info.gpus[0] if info.gpus else str(device)

    def known(self, worker: PooledWorker, value: Any) -> None:
        """What a new process says of itself; an exception when it could not."""
        worker.starting = False
        if isinstance(value, Info):
            worker.pid, worker.gpus, worker.mps = value.pid, value.gpus, bool(value.mps)
            self._log.write(
                "worker_started",
                worker=worker.name,
                device=worker.device,
                pid=value.pid,
                seconds=time.time() - worker.asked,
                **({} if value.mps is None else {"mps": value.mps}),
            )
            if value.mps is False:
                self._gpus.time_sliced(value.why)

    @property
    def living(self) -> Collection[PooledWorker]:
        """All of them."""
        return self._pool.workers.values()

    def alive(self, worker: PooledWorker) -> bool:
        return worker.name in self._pool.workers

    def busy(self, device: int) -> bool:
        """Whether a worker of the device serves a trial or cleans up after one."""
        return self._pool.busy(device)

    @property
    def patience(self) -> float:
        """Seconds that a stopped trial's worker may take to clean up: stock Tune's own limit."""
        return float(os.environ.get("TUNE_FORCE_TRIAL_CLEANUP_S", "600"))

    def watch(self, worker: PooledWorker, within: float) -> None:
        """Kill the worker if it has not cleaned up within so many seconds."""
        self._watched.setdefault(worker.name, time.monotonic() + within)

    def kill_overdue(self, now: float) -> None:
        """Replace what has not cleaned up in time; ``now`` on the monotonic clock."""
        for name, deadline in list(self._watched.items()):
            if now > deadline:
                del self._watched[name]
                worker = self._pool.workers.get(name)
                if worker is not None and worker.busy:
                    self._replace(worker, "it did not clean up in time")

    def cleaned(self, worker: PooledWorker, value: Any) -> None:
        """A worker has unloaded a trial: it is free, or it is replaced."""
        self._watched.pop(worker.name, None)
        if not self.alive(worker):
            return
        if value is None:
            self._pool.give_back(worker)
        else:
            self._replace(worker, str(value))

    def _replace(self, worker: PooledWorker, reason: str) -> None:
        self._log.write("worker_replaced", worker=worker.name, device=worker.device, reason=reason[:500])
        self._pool.discard(worker)

    def lost(self, worker: PooledWorker, reason: str) -> None:
        """Its process is dead."""
        if self.alive(worker):
            self._log.write("worker_lost", worker=worker.name, device=worker.device, reason=reason[:500])
            self._losses.inc(1, {"job": self._job})
            self._pool.discard(worker)
            if worker.mps:
                # A fault of one client ends all of its GPU: those that are idle have not noticed yet.
                self._pool.clear(worker.device)

    def clear(self, device: int) -> None:
        """The device is gone, and with it those of its workers that are idle."""
        self._pool.clear(device)

    def close(self) -> None:
        """Kill all of them."""
        self._pool.close()
