"""The shell's hands: calls to workers and what comes back, workers taken and cleaned up, devices that come and go.

Every call is a Ray future with one handler. What happened is collected as events for the engine; nothing is
decided here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorPlacementGroupRemoved, ActorUnschedulableError, RayActorError

from fluidtune.cluster.pool import PooledWorker
from fluidtune.engine import messages as m
from fluidtune.tune.job import Job

#: How often devices that are not there are looked for, seconds.
POLL_S = 0.5


class DeviceRevoked(RayActorError):
    """What held the worker's device is removed: no worker can live there any more."""


@dataclass(frozen=True, eq=False)
class _Want:
    """A worker of ``device``, that sees ``others`` too, is wanted: see `Crew.take`."""

    device: int
    others: tuple[int, ...]
    then: Callable[[PooledWorker], None]
    still: Callable[[], bool]
    died: Callable[[], None] | None


class Crew:
    """Belongs to one manager; ``job`` owns the processes."""

    def __init__(self, job: Job):
        self.job = job
        #: What the engine has not been told yet.
        self.events: list[m.Event] = []
        #: Ray futures and who handles them: (value or exception) -> None.
        self._futures: dict[Any, Callable[[Any], None]] = {}
        #: Who waits for a worker that is still cleaning up, or for others to have started.
        self._wanting: list[_Want] = []
        #: Workers that have been told to clean up and have not answered.
        self.cleaning = 0
        self._polled = 0.0

    # --- futures

    def track(self, future: Any, handler: Callable[[Any], None]) -> None:
        self._futures[future] = handler

    def drop(self, future: Any) -> None:
        """Nobody is interested in this one any more."""
        self._futures.pop(future, None)

    def wait(self, timeout: float | None) -> None:
        """Handle at most one future that is ready within ``timeout`` seconds."""
        if not self._futures:
            time.sleep(min(0.1, timeout or 0.0))
            return
        ready, _ = ray.wait(list(self._futures), num_returns=1, timeout=timeout)
        for future in ready:
            self.resolve(future)

    def resolve(self, future: Any) -> None:
        """Wait for this future and handle it."""
        handler = self._futures.pop(future)
        try:
            value = ray.get(future)
        except (ActorPlacementGroupRemoved, ActorUnschedulableError) as error:
            value = DeviceRevoked(error_msg=str(error))
        except Exception as error:
            value = error
        handler(value)

    def close(self) -> None:
        self._futures.clear()
        self._wanting.clear()

    # --- workers

    def take(
        self,
        device: int,
        others: tuple[int, ...],
        then: Callable[[PooledWorker], None],
        still: Callable[[], bool],
        died: Callable[[], None] | None = None,
    ) -> None:
        """Call ``then`` with a worker of the device that sees ``others`` too; at once, or when the pool has one.

        ``still``: whether it is wanted, asked again before a later one is taken. ``died``: called instead if that
        worker dies before, as a new process takes seconds; None: wait for it.
        """
        if not self.job.workers.ready(device, others):
            self._wanting.append(_Want(device, others, then, still, died))
            return
        worker, fresh = self.job.workers.take(device, others)
        if fresh:
            self.track(worker.actor.info.remote(), lambda value: self.job.workers.known(worker, value))
        then(worker)

    def serve(self) -> None:
        """Give those that wait for a worker the ones that are free now."""
        wanting, self._wanting = self._wanting, []
        for want in wanting:
            if want.still():
                self.take(want.device, want.others, want.then, want.still, want.died)

    def clean(self, worker: PooledWorker, within: float, then: Callable[[], None] | None = None) -> None:
        """Have the worker unload its trial; ``within``: seconds after which it is killed instead.

        ``then`` is called when it has, or is dead.
        """
        if not self.job.workers.alive(worker):
            if then is not None:
                then()
            return
        self.cleaning += 1
        worker.cleaning = time.monotonic()
        self.job.workers.watch(worker, within)

        def cleaned(value: Any) -> None:
            self.cleaning -= 1
            self.job.workers.cleaned(worker, value)
            if then is not None:
                then()

        self.track(worker.actor.unload.remote(), cleaned)

    def lost(self, worker: PooledWorker, error: Exception) -> None:
        """The worker's process is dead; perhaps its device is gone with it."""
        self.job.workers.lost(worker, first_line(error))
        if isinstance(error, DeviceRevoked):
            self.job.reservation.revoked(worker.device)
        self.poll(force=True)
        for want in list(self._wanting):
            if want.device == worker.device and want.died is not None:
                self._wanting.remove(want)
                want.died()

    # --- devices

    def poll(self, force: bool = False) -> None:
        """Look for devices that came or went. Costs calls to Ray, so only while one is missing, or when told to.

        Who waits for a worker of a lost device waits no more: the engine gives the trial another.
        """
        now = time.monotonic()
        if not force and (self.job.reservation.complete or now - self._polled < POLL_S):
            return
        self._polled = now
        news = self.job.poll_devices()
        lost = {event.device for event in news if isinstance(event, m.DeviceLost)}
        self._wanting = [want for want in self._wanting if lost.isdisjoint((want.device, *want.others))]
        self.events.extend(news)


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
