"""A tuning job as the arbiter's tenant: its agent, kept in touch with the arbiter by a thread of the driver.

The job's executor asks `poll` what it gained, has to leave, and lost, in its own time. While the arbiter is away, what
the job holds stays its own: the reservations are Ray's, and only the arbiter removes them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Mapping
from typing import Any

import ray
from ray.util import get_placement_group

from themis_bridge import messages as m
from themis_bridge.agent import Agent, Gained, Lost, Notice, Work
from themis_bridge.errors import ThemisError
from themis_bridge.shell import control, reservations

logger = logging.getLogger(__name__)

#: Seconds between two exchanges, and the longest wait for an answer.
POLL_S, ANSWER_S = 0.2, 10.0


class Tenant:
    """See the module.

    ``bundle``: what one device reserves, Ray's names, one GPU (or core) and what goes with it.

    Raises:
        ThemisError: a name that cannot be, or that another job has.
    """

    def __init__(self, app: str, work: Work, bundle: Mapping[str, float], unit: str | None = None):
        reservations.check_app_name(app)
        self.app, self._bundle, self._unit = app, dict(bundle), unit
        self._agent = Agent(app, f"{app}/{uuid.uuid4().hex[:8]}", work)
        self._lock = threading.Lock()
        self._outbox: list[m.AppEvent] = []
        self._notices: list[Notice] = []
        #: GPU -> token that is told of already but not yet made by Ray.
        self._coming: list[Gained] = []
        self._arbiter = control.start(unit)
        self._over = threading.Event()
        self._join()
        self._exchange()
        if self._agent.refused:
            raise ThemisError(f"{self._agent.refused} (arbiter of this Ray cluster)")
        self._thread = threading.Thread(target=self._loop, name="themis-agent", daemon=True)
        self._thread.start()

    def poll(self) -> list[Notice]:
        """What happened since the last call. A GPU is gained when what reserves it is there.

        Raises:
            ThemisError: the arbiter does not want this job any more.
        """
        if self._agent.refused:
            raise ThemisError(self._agent.refused)
        with self._lock:
            notices, self._notices = self._notices, []
        out: list[Notice] = []
        for notice in notices:
            if isinstance(notice, Gained):
                self._coming.append(notice)
                continue
            if isinstance(notice, Lost):
                waiting = [each for each in self._coming if each.token == notice.token]
                self._coming = [each for each in self._coming if each.token != notice.token]
                if waiting:
                    continue
            out.append(notice)
        for notice in list(self._coming):
            if reservations.state(self.app, notice.gpu.id, notice.token) == "CREATED":
                self._coming.remove(notice)
                out.append(notice)
        return out

    def group(self, gpu: str, token: int) -> Any:
        """The placement group of a lease. Raises ThemisError if the token is not the newest known."""
        if not self._agent.admits(gpu, token):
            raise ThemisError(f"the lease of {gpu!r} under token {token} is over; a newer one exists")
        return get_placement_group(reservations.group_name(self.app, gpu, token))

    def vacated(self, gpu: str) -> None:
        """Nothing of this job runs on the GPU any more; it may go to somebody else."""
        with self._lock:
            self._outbox += self._agent.vacated(gpu)

    def close(self) -> None:
        """The job is done: give everything back."""
        self._over.set()
        self._thread.join(ANSWER_S)
        with contextlib.suppress(ray.exceptions.RayError):
            leaving: list[m.AppEvent] = [m.AppLeft(self.app, self._agent.session)]
            ray.get(self._arbiter.exchange.remote(self.app, self._agent.session, leaving), timeout=ANSWER_S)

    # --- the thread

    def _loop(self) -> None:
        while not self._over.wait(POLL_S):
            try:
                self._exchange()
            except (ray.exceptions.RayError, ValueError) as error:
                logger.warning("themis: the arbiter does not answer (%s); the job goes on", type(error).__name__)
                self._find()

    def _find(self) -> None:
        """Ray starts a dead arbiter again; one that was stopped is started by whoever needs it."""
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            self._arbiter = control.start(self._unit)
            self._join()

    def _join(self) -> None:
        ray.get(self._arbiter.join.remote(self.app, self._agent.session, self._bundle), timeout=ANSWER_S)

    def _exchange(self) -> None:
        with self._lock:
            sending = list(self._outbox)
        answer = ray.get(
            self._arbiter.exchange.remote(self.app, self._agent.session, sending), timeout=ANSWER_S
        )
        with self._lock:
            # Only what was answered is off the list; a message that comes twice does no harm.
            del self._outbox[: len(sending)]
            for instruction in answer:
                events, notices = self._agent.handle(instruction)
                self._outbox += events
                self._notices += notices
            hurry = any(isinstance(event, (m.RhoAnswer, m.BidAnswer, m.AppJoined)) for event in self._outbox)
        if any(isinstance(event, m.AppJoined) for event in self._outbox):
            self._join()
        if hurry and not self._over.is_set():
            self._exchange()
