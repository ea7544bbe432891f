"""Which trial gets a worker process when, and what becomes of the worker afterwards.

A trial requests a worker of one device. The pool (`fluidtune.cluster.pool`) has one at once or later; then the trial
gets it. When the trial leaves, the worker unloads it and ends, or goes back to the pool. A worker that dies is
reported here. This module also looks for devices that came or went, because a request for a lost device can never be
served.

Nothing is scheduled here: the engine has chosen the device before a worker is requested.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.cluster.hosting.messages import WorkerInfo
from fluidtune.cluster.pool import PooledWorker
from fluidtune.engine import messages as m
from fluidtune.error_lines import first_line
from fluidtune.ray_compat.cluster_state import draining_nodes
from fluidtune.tune.job_log import REASON_LENGTH
from fluidtune.tune.ray_calls import DeviceRevoked, RayCalls

if TYPE_CHECKING:
    from fluidtune.tune.tuning_job import TuningJob

log = logging.getLogger(__name__)

#: While a device is missing, devices are looked for this often, seconds.
POLL_S = 0.5
#: Whether Ray drains a node is asked this often, seconds. A spot instance has half a minute or more.
DRAINED_S = 2.0
#: Processes that are started in one pass of the driver's loop at most; Tune's loop goes on before the others follow.
STARTS_AT_ONCE = 32
#: A worker of a trial that lost another worker is killed when it has not unloaded within this time, seconds.
UNLOAD_BROKEN_S = 30.0


@dataclass(frozen=True, eq=False)
class WorkerRequest:
    """A trial needs a worker of ``device`` that also sees the GPUs of the devices ``others``.

    ``on_worker`` is called with the worker, at once or when the pool has one. ``still_wanted`` is asked before a later
    attempt to serve the request. ``on_death`` is called instead of ``on_worker`` if a worker of the device dies
    meanwhile, because a new process takes seconds; None: the request then waits for the new process.
    """

    device: int
    others: tuple[int, ...]
    on_worker: Callable[[PooledWorker], None]
    still_wanted: Callable[[], bool]
    on_death: Callable[[], None] | None = None


class WorkerDispatch:
    """Belongs to one manager. ``emit`` hands an event to the engine; ``job`` owns the pool and the devices."""

    def __init__(self, job: TuningJob, calls: RayCalls, emit: Callable[[m.Event], None]):
        self._job = job
        self._calls = calls
        self._emit = emit
        #: Requests that the pool could not serve yet, oldest first.
        self._requests: list[WorkerRequest] = []
        #: Processes started since the last `serve_requests`, and whether that one left some for the next.
        self._started, self.behind = 0, False
        #: How many workers were told to unload their trials and have not answered.
        self.unloading = 0
        #: Worker name -> when it is killed if it has not unloaded (monotonic clock).
        self._deadlines: dict[str, float] = {}
        #: Called with each device that is gone or given back.
        self.on_gone: Callable[[int], None] = lambda device: None
        #: When devices were last looked for, and draining nodes (monotonic clock).
        self._polled = self._looked = 0.0
        #: Devices that are there of which the engine was told that they leave.
        self._leaving: set[int] = set()
        #: The driver is to end: no devices are looked for.
        self._ending = False

    # --- requests

    def request_worker(self, request: WorkerRequest) -> None:
        """Serve the request at once if the pool can, else keep it for `serve_requests`."""
        pool = self._job.pool
        unknown = pool.unknown_gpus(request.device, request.others)
        for device in unknown:
            self._look_at_gpu(device)
        if unknown or not pool.can_serve(request.device, request.others):
            self._requests.append(request)
            return
        worker = pool.take_idle_worker(request.device, request.others)
        if worker is None:
            if self._started == STARTS_AT_ONCE:
                self._requests.append(request)
                return
            self._started += 1
            worker = pool.start_worker(request.device, request.others)
            self._ask_who(worker)
        elif worker.started_for == "spare":
            self._job.log.write("spare_taken", worker=worker.name, device=worker.device)
        request.on_worker(worker)

    def _ask_who(self, worker: PooledWorker) -> None:
        self._calls.track_call(worker.actor.info.remote(), lambda value: self._worker_answered(worker, value))

    def _look_at_gpu(self, device: int) -> None:
        """Start a process that says which GPU the device is, for a worker that is to see it beside its own."""
        probe = self._job.pool.start_probe(device)
        if probe is None:
            return

        def on_answer(value: Any) -> None:
            self._worker_answered(probe, value)
            if isinstance(value, WorkerInfo):
                self._job.pool.discard_worker(probe)
            else:
                self.worker_died(probe, value)

        self._calls.track_call(probe.actor.info.remote(), on_answer)

    def serve_requests(self) -> None:
        """Try the waiting requests again, oldest first; drop those that are no longer wanted. Ends a pass."""
        requests, self._requests = self._requests, []
        for request in requests:
            if request.still_wanted():
                self.request_worker(request)
        for worker in self._job.pool.start_spares():
            self._ask_who(worker)
        self.behind = self._started == STARTS_AT_ONCE
        self._started = 0

    def _worker_answered(self, worker: PooledWorker, value: Any) -> None:
        """A new process says what it is; ``value`` is an exception when it could not."""
        worker.starting = False
        if isinstance(value, WorkerInfo):
            worker.info = value
            self._job.pool.note_gpu(worker)
            self._job.log.worker_started(worker, value)
            if value.mps is False:
                self._job.gpu_telemetry.warn_time_slices(value.why)
            if value.kind is not None:
                self._job.gpu_telemetry.note_kind(worker.device, value.kind)
                self._emit(m.ModelFound(worker.device, value.kind))
            if value.broken is not None:
                self.device_broken(worker.device, value.broken)

    # --- after a trial

    def unload_trial(
        self, worker: PooledWorker, within: float, then: Callable[[], None] | None = None, keep: bool = False
    ) -> None:
        """Have the worker unload its trial; kill the worker if that takes more than ``within`` seconds.

        ``then`` is called when the worker has done so, or is dead. ``keep``: see `Worker.unload`.
        """
        if not self._job.pool.is_alive(worker):
            if then is not None:
                then()
            return
        self.unloading += 1
        worker.unload()
        self._deadlines[worker.name] = time.monotonic() + within

        def on_answer(value: Any) -> None:
            self.unloading -= 1
            self._trial_unloaded(worker, value)
            if then is not None:
                then()

        self._calls.track_call(worker.actor.unload.remote(keep), on_answer)

    def kill_worker(self, worker: PooledWorker, why: str) -> None:
        """End the worker's process at once, unless it is dead."""
        if self._job.pool.is_alive(worker):
            self._job.log.write("worker_killed", worker=worker.name, device=worker.device, reason=why[:REASON_LENGTH])
            self._job.pool.kill_worker(worker)

    def kill_overdue_workers(self) -> None:
        """Kill workers that have not unloaded their trials in time."""
        now = time.monotonic()
        for name, deadline in list(self._deadlines.items()):
            if now > deadline:
                del self._deadlines[name]
                worker = self._job.pool.workers.get(name)
                if worker is not None and worker.busy:
                    self.kill_worker(worker, "it did not unload its trial in time")

    def _trial_unloaded(self, worker: PooledWorker, value: Any) -> None:
        """The worker answered `unload`: it serves further trials (True), ends, or has failed."""
        self._deadlines.pop(worker.name, None)
        if not self._job.pool.is_alive(worker):
            return
        if value is True and worker.device in self._job.devices.nodes:  # else its device was lost meanwhile
            self._job.pool.return_worker(worker)
        elif isinstance(value, RayActorError):  # as a leader whose followers have noticed first
            self.worker_died(worker, value)
        else:
            if isinstance(value, Exception):
                self.stop_forking_if_asked(value)
            self._job.pool.discard_worker(worker)

    def stop_forking_if_asked(self, error: Exception) -> str | None:
        """Why no more processes are forked, if this error says so; None: it does not."""
        needs_plain = NeedsPlainProcess.said_by(error)
        if needs_plain is not None:
            self._job.pool.stop_forking(needs_plain)
        return needs_plain

    # --- losses

    def worker_died(self, worker: PooledWorker, error: Exception) -> None:
        """The worker's process is dead; its device may be gone with it."""
        pool = self._job.pool
        if pool.is_alive(worker):
            self._job.log.worker_lost(worker, first_line(error))
            pool.forget_worker(worker)
            if worker.in_mps:
                # A fault of one MPS client ends all clients of its GPU; the idle ones have not noticed yet.
                pool.discard_idle_workers(worker.device)
        # It may have been raised while Ray read what the process was to do, where no error can be returned.
        self.stop_forking_if_asked(error)
        if isinstance(error, DeviceRevoked):
            self._job.devices.revoked(worker.device, worker.group)
        self.poll_devices(force=True)
        for request in list(self._requests):
            if request.device == worker.device and request.on_death is not None:
                self._requests.remove(request)
                request.on_death()

    def device_broken(self, device: int, why: str) -> bool:
        """The device's hardware has failed: no trial of the job gets it again. False: the job has no other device."""
        if not self._job.devices.give_up(device, why):
            log.warning("FluidTune: device %d is the only one that is left, and may be broken: %s", device, why)
            return False
        log.warning("FluidTune: device %d is not used any more; nvidia-smi and dmesg (Xid) say more: %s", device, why)
        self.poll_devices(force=True)
        return True

    def poll_devices(self, force: bool = False) -> None:
        """Look for devices that came or went, and tell the engine. Unless ``force``, only now and then, or when the
        source says that it is urgent: a look costs calls to Ray.

        Requests for a worker of a lost device are dropped: the engine gives the trial another device.
        """
        now = time.monotonic()
        devices = self._job.devices
        if self._ending:
            return
        if now - self._looked >= DRAINED_S:
            self._looked = now
            draining = tuple(draining_nodes())
            for device, node in devices.nodes.items():
                if any(each.startswith(node) for each in draining):
                    devices.vacate(device)
                    self._leave(device)
        if not force and now - self._polled < POLL_S and not devices.urgent:
            return
        self._polled = now
        came, gone = devices.poll()
        for device in gone:
            self._leaving.discard(device)
            self._job.pool.discard_idle_workers(device)
            self.on_gone(device)
            why = devices.reasons.get(device)
            event = "device_returned" if device in devices.given_back and why is None else "device_lost"
            self._job.log.write(event, device=device, **({} if why is None else {"reason": why[:REASON_LENGTH]}))
            self._emit(m.DeviceLost(device))
        for device, node in self._job.setup.shown_nodes(came).items():
            self._job.log.write("device_gained", device=device, node=node)
            self._emit(m.DeviceGained(device, node))
        for device in devices.leaving():
            if device in devices.nodes:
                self._leave(device)
        lost = set(gone)
        self._requests = [each for each in self._requests if lost.isdisjoint((each.device, *each.others))]

    def leave_all_devices(self) -> None:
        """The driver is to end: what can be saved leaves its devices, and nothing starts any more."""
        self._ending = True
        for device in self._job.devices.nodes:
            self._leave(device)

    def _leave(self, device: int) -> None:
        """The device will be lost soon: tell the engine once."""
        if device not in self._leaving:
            self._leaving.add(device)
            self._emit(m.DeviceLeaving(device))
