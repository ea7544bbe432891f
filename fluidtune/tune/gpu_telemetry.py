"""What is heard of a job's GPUs from its workers: NVML's samples, and whether MPS could be had. It decides nothing."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

from ray.util.metrics import Gauge

from fluidtune.cluster.gpu_probe import SAMPLE_S
from fluidtune.cluster.pool import PooledWorker
from fluidtune.report import EventLog
from salus_share.telemetry import DeviceSample

logger = logging.getLogger(__name__)


class GpuNotes:
    """Into the event log, the metrics and, once, the user's ear. ``job``: its name in the metrics."""

    def __init__(self, job: str, log: EventLog):
        self._job = job
        self._log = log
        self._busy = Gauge("fluidtune_gpu_utilisation", "Part of the time that a GPU computes", ("job", "device"))
        self._memory = Gauge("fluidtune_gpu_memory_used", "Bytes in use on a GPU", ("job", "device"))
        self._of_worker = Gauge("fluidtune_worker_gpu_memory", "Bytes that a worker holds", ("job", "worker"))
        #: When each device was last looked at: its trials all do.
        self._looked: dict[int, float] = {}
        #: Why workers are no clients of MPS, as far as it was said.
        self._said: set[str] = set()

    def sampled(self, device: int, sample: DeviceSample, workers: Iterable[PooledWorker]) -> None:
        """NVML's view of a device, from one of its workers."""
        now = time.monotonic()
        if now - self._looked.get(device, -math.inf) < SAMPLE_S / 2:
            return
        self._looked[device] = now
        self._log.write("device_sample", device=device, **sample.as_fields())
        tags = {"job": self._job, "device": str(device)}
        self._memory.set(sample.memory_used, tags)
        if sample.utilisation is not None:
            self._busy.set(sample.utilisation, tags)
        for worker in workers:
            if worker.pid in sample.processes:
                self._of_worker.set(sample.processes[worker.pid], {"job": self._job, "worker": worker.name})

    def time_sliced(self, why: str) -> None:
        """A worker that shares its GPU is no client of MPS."""
        if why not in self._said:
            self._said.add(why)
            logger.warning("FluidTune: no MPS, the trials of a GPU take time slices: %s", why)
