"""A tuning job on a shared cluster: its devices are leases of the Themis arbiter.

`LeasedDevices` stands where a `Reservation` stands for a job of its own: devices come and go as leases do. `Progress`
answers the arbiter's questions from the engine's heights. What a lease is and who gets it is decided in themis_bridge.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fluidtune.cluster.devices import Layout
from fluidtune.engine import Engine
from fluidtune.errors import FluidTuneError
from themis_bridge import JobInfo, ThemisError, independent_finish_time
from themis_bridge.agent import Gained, Leave, Lost
from themis_bridge.bids import Valuation
from themis_bridge.shell.tenant import Tenant

#: Seconds of a trial of which nothing is known yet.
UNKNOWN_S = 60.0


class Progress:
    """What the job has done and has left, as of the last `update`; read by the agent's thread."""

    def __init__(self, max_workers: int | None):
        self._max_workers = max_workers
        self._started = time.monotonic()
        self._peak = 1
        self._left: list[JobInfo] = []
        self._done = 0.0

    def update(self, engine: Engine) -> None:
        """Take the engine's view; called by the thread that owns the engine."""
        left, done = [], 0.0
        for view in engine.trials.values():
            known = view.seconds.get(1.0) or next(iter(view.seconds.values()), 0.0)
            done += view.done * known
            if view.status in ("running", "suspending", "waiting"):
                widest = self._max_workers if view.kind == "elastic" else max(1, int(view.width))
                # A trial without an end counts as half done.
                seconds = view.height if view.iterations is not None else max(view.done * known, UNKNOWN_S)
                left.append(JobInfo(1.0, max(seconds, 1e-3), widest or 1_000))
        self._peak = max(self._peak, sum(job.max_gpus for job in left))
        self._left, self._done = left, done

    @property
    def useful(self) -> int:
        """The most devices that its trials could use now."""
        return sum(job.max_gpus for job in self._left)

    def valuation(self, contention: float, cluster_gpus: int) -> Valuation:
        left = self._left
        budget = self._done + sum(job.work for job in left)
        independent = independent_finish_time(max(budget, 1e-3), max(1, cluster_gpus), self._peak, contention)
        return Valuation([left] if left else [], time.monotonic() - self._started, independent)

    def facts(self) -> None:
        return None


class LeasedDevices:
    """Has the methods of `fluidtune.cluster.devices.Reservation`.

    ``app``: the name under which the arbiter knows the job. ``engine``: asked for when first needed.

    Raises:
        FluidTuneError: the arbiter cannot lease what one device of this job is, or has an app of that name.
    """

    def __init__(self, plan: Layout, app: str, max_workers: int | None, engine: Callable[[], Engine]):
        unit = "GPU" if plan.kind == "gpu" else "CPU"
        if plan.bundle.get(unit) != 1.0:
            raise FluidTuneError(
                f"a trial asks for {plan.bundle.get(unit, 0):g} {unit}s for one device; the arbiter leases single ones: "
                f"ask for 1 {unit} per trial, or run without arbiter"
            )
        self._engine = engine
        self._progress = Progress(max_workers)
        try:
            self._tenant = Tenant(app, self._progress, plan.bundle, unit)
        except ThemisError as error:
            raise FluidTuneError(str(error)) from error
        #: device -> node, for those that are there.
        self.nodes: dict[int, str] = {}
        #: device -> (GPU, token).
        self._leases: dict[int, tuple[str, int]] = {}
        #: Devices whose leases end and are not renewed.
        self._leaving: set[int] = set()
        self._count = 0

    @property
    def complete(self) -> bool:
        """Never: leases come and go."""
        return False

    def group(self, device: int) -> Any:
        return self._tenant.group(*self._leases[device])

    def poll(self, wait_s: float = 0.0) -> tuple[dict[int, str], list[int]]:
        """As of `Reservation`. A device that has to be left is gone as soon as nothing runs on it."""
        deadline = time.monotonic() + wait_s
        came: dict[int, str] = {}
        gone: list[int] = []
        while True:
            self._look(came, gone)
            if came or time.monotonic() >= deadline:
                return came, gone
            time.sleep(0.05)

    def _look(self, came: dict[int, str], gone: list[int]) -> None:
        engine = self._engine()
        self._progress.update(engine)
        numbers = {lease: device for device, lease in self._leases.items()}
        for notice in self._tenant.poll():
            if isinstance(notice, Gained):
                device, self._count = self._count, self._count + 1
                self._leases[device] = (notice.gpu.id, notice.token)
                came[device] = self.nodes[device] = notice.gpu.machine
                continue
            if not isinstance(notice, (Leave, Lost)) or (notice.gpu.id, notice.token) not in numbers:
                continue
            device = numbers[notice.gpu.id, notice.token]
            if isinstance(notice, Leave):
                self._leaving.add(device)
            elif device in self._leases:
                self._drop(device, gone)
        tenants = engine.devices
        idle = [device for device in self.nodes if device in tenants and not tenants[device]]
        surplus = len(self.nodes) - max(1, self._progress.useful)
        for device in idle:
            if device in self._leaving or (surplus > 0 and not engine.waiting):
                self._tenant.vacated(self._leases[device][0])
                self._drop(device, gone)
                surplus -= 1

    def _drop(self, device: int, gone: list[int]) -> None:
        gone.append(device)
        self._leaving.discard(device)
        del self._leases[device], self.nodes[device]

    def remove(self) -> None:
        """Give everything back."""
        self.nodes.clear()
        self._leases.clear()
        self._tenant.close()
