"""What workers say of a job's GPUs: NVML's samples, and why a GPU is shared without MPS. It decides nothing."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

from ray.util.metrics import Gauge

from fluidtune.cluster.pool import PooledWorker
from fluidtune.cluster.sharing.gpu_probe import SAMPLE_S
from fluidtune.tune.job_log import JobLog
from salus_share.telemetry import DeviceSample

logger = logging.getLogger(__name__)


class GpuTelemetry:
    """Writes into the event log and the metrics, and warns the user once. ``job``: the job's name in the metrics."""

    def __init__(self, job: str, log: JobLog):
        self._job = job
        self._log = log
        self._utilisation = Gauge(
            "fluidtune_gpu_utilisation", "Part of the time that a GPU computes", ("experiment", "device")
        )
        self._memory = Gauge("fluidtune_gpu_memory_used", "Bytes in use on a GPU", ("experiment", "device"))
        self._worker_memory = Gauge(
            "fluidtune_worker_gpu_memory", "Bytes that a worker holds", ("experiment", "worker")
        )
        #: Device -> when a sample of it was last recorded (monotonic clock). Every trial of a device brings samples.
        self._recorded: dict[int, float] = {}
        #: Device -> the product name of its GPU; None: a warning has named several kinds.
        self._kinds: dict[int, str] | None = {}
        #: The reasons, named in warnings, why workers are no clients of MPS.
        self._told: set[str] = set()

    def record_sample(self, device: int, sample: DeviceSample, workers: Iterable[PooledWorker]) -> None:
        """Record NVML's view of a device, which one of its workers took; ``workers``: all of the job's."""
        now = time.monotonic()
        if now - self._recorded.get(device, -math.inf) < SAMPLE_S / 2:
            return
        self._recorded[device] = now
        self._log.write("device_sample", device=device, **sample.as_fields())
        tags = {"experiment": self._job, "device": str(device)}
        self._memory.set(sample.memory_used, tags)
        if sample.utilisation is not None:
            self._utilisation.set(sample.utilisation, tags)
        for worker in workers:
            if worker.pid in sample.processes:
                self._worker_memory.set(sample.processes[worker.pid], {"experiment": self._job, "worker": worker.name})

    def warn_time_slices(self, why: str) -> None:
        """A worker that shares its GPU is no client of MPS: warn the user, once for every reason."""
        if why not in self._told:
            self._told.add(why)
            logger.warning("FluidTune: no MPS, the trials of a GPU take time slices: %s", why)

    def note_kind(self, device: int, kind: str) -> None:
        """Note of what kind a device is: warn the user, once, if the job has GPUs of several kinds."""
        if self._kinds is None:
            return
        self._kinds[device] = kind
        kinds = sorted(set(self._kinds.values()))
        if len(kinds) > 1:
            self._kinds = None
            logger.warning(
                "FluidTune: the job has GPUs of several kinds (%s) and plans as if all were equally fast; give it those"
                " of one kind: start Ray with their UUIDs in CUDA_VISIBLE_DEVICES",
                ", ".join(kinds),
            )
