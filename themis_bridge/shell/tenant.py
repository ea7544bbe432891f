"""A tuning job as the arbiter's tenant: its agent, kept in touch with the arbiter by a thread of the driver.

The job's executor asks `poll` what it gained, has to leave, and lost, in its own time. While the arbiter is away, what
the job holds stays its own: the reservations are Ray's, and only the arbiter removes them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

import ray

from themis_bridge import messages as m
from themis_bridge.agent import Agent, Gained, Lost, Notice, Work
from themis_bridge.errors import ThemisError
from themis_bridge.shell import control, reservations

logger = logging.getLogger(__name__)

#: Seconds between two exchanges, and the longest wait for an answer.
POLL_S, ANSWER_S = 0.2, 10.0
#: A job that starts again waits so long for its former self to be given up, seconds; longer than `Settings.patience_s`.
JOIN_S = 45.0


class Tenant:
    """See the module.

    ``bundle``: what one device reserves, Ray's names, one GPU (or core) and what goes with it.

    Raises:
        ThemisError: a name that cannot be, or that another job has, or devices that the arbiter does not lease.
    """

    def __init__(self, app: str, work: Work, bundle: Mapping[str, float], unit: str):
        reservations.check_app_name(app)
        self.app, self._bundle, self._unit, self._work = app, dict(bundle), unit, work
        self._lock = threading.Lock()
        self._outbox: list[m.AppEvent] = []
        self._notices: list[Notice] = []
        #: Leases that were told of and that Ray has not made yet.
        self._coming: list[Gained] = []
        #: (GPU, token) -> the placement group.
        self._groups: dict[tuple[str, int], Any] = {}
        self._over = threading.Event()
        self._register()
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
        return notices

    def group(self, gpu: str, token: int) -> Any:
        """The placement group of a lease. When the lease is over Ray refuses whatever is started in it."""
        return self._groups[gpu, token]

    def vacated(self, gpu: str) -> None:
        """Nothing of this job runs on the GPU any more; it may go to somebody else."""
        with self._lock:
            self._outbox += self._agent.vacated(gpu)

    def close(self) -> None:
        """The job is done: give everything back."""
        self._over.set()
        self._thread.join(ANSWER_S)
        with contextlib.suppress(ray.exceptions.RayError):
            self._send([m.AppLeft(self.app, self._agent.session)])

    # --- getting in

    def _register(self) -> None:
        deadline = time.monotonic() + JOIN_S
        while True:
            self._agent = Agent(self.app, f"{self.app}/{uuid.uuid4().hex[:8]}", self._work)
            try:
                self._arbiter = control.start(self._unit)
                self._join()
                self._exchange()
                trouble = self._agent.refused
            except ThemisError as error:
                raise ThemisError(_plain(error)) from None
            except ray.exceptions.RayActorError as error:
                trouble = f"the arbiter does not answer: {error}"
            if not trouble:
                return
            if time.monotonic() > deadline:
                raise ThemisError(f"{trouble} (arbiter of this Ray cluster)")
            logger.warning("themis: %s; trying again", trouble)
            time.sleep(1.0)

    def _join(self) -> None:
        ray.get(self._arbiter.join.remote(self.app, self._agent.session, self._bundle), timeout=ANSWER_S)

    def _join_again(self) -> None:
        """Join an arbiter that does not know the job; if it leases something else now, the job cannot go on."""
        try:
            self._join()
        except ThemisError as error:
            self._agent.refused = _plain(error)

    # --- the thread

    def _loop(self) -> None:
        while not self._over.wait(POLL_S) and not self._agent.refused:
            if not ray.is_initialized():
                return  # the driver has left the cluster; a call would make Ray start another one
            try:
                self._exchange()
            except (ray.exceptions.RayError, ValueError) as error:
                logger.warning("themis: the arbiter does not answer (%s); the job goes on", type(error).__name__)
                self._find()
            except Exception:
                # Without this thread the job would lose its leases one by one.
                logger.exception("themis: the agent of %s failed; it goes on", self.app)

    def _find(self) -> None:
        """Ray starts a dead arbiter again; one that was stopped is started by whoever needs it."""
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            self._arbiter = control.start(self._unit)
            self._join_again()

    def _send(self, events: list[m.AppEvent]) -> list[m.Instruction]:
        answer: list[m.Instruction] = ray.get(
            self._arbiter.exchange.remote(self.app, self._agent.session, events), timeout=ANSWER_S
        )
        return answer

    def _exchange(self) -> None:
        """Send what waits and take what comes, until nothing has to be answered at once."""
        while True:
            with self._lock:
                sending = list(self._outbox)
            answer = self._send(sending)
            with self._lock:
                # Only what was answered is off the list; a message that comes twice does no harm.
                del self._outbox[: len(sending)]
                for instruction in answer:
                    if isinstance(instruction, m.Refused):
                        logger.warning("themis: %s", instruction.why)
                    events, notices = self._agent.handle(instruction)
                    self._outbox += events
                    for notice in notices:
                        self._note(notice)
                due = list(self._outbox)
            if any(isinstance(event, m.AppJoined) for event in due):
                self._join_again()
            if not due or self._agent.refused or self._over.is_set():
                break
        self._look_for_groups()

    def _note(self, notice: Notice) -> None:
        if isinstance(notice, Gained):
            self._coming.append(notice)
            return
        if isinstance(notice, Lost):
            key = (notice.gpu.id, notice.token)
            left = [each for each in self._coming if (each.gpu.id, each.token) != key]
            if len(left) < len(self._coming):
                self._coming = left
                return
        self._notices.append(notice)

    def _look_for_groups(self) -> None:
        if not self._coming:
            return
        there = reservations.created()
        with self._lock:
            for notice in list(self._coming):
                group = there.get((self.app, notice.gpu.id, notice.token))
                if group is not None:
                    self._groups[notice.gpu.id, notice.token] = group
                    self._coming.remove(notice)
                    self._notices.append(notice)


def _plain(error: ThemisError) -> str:
    """What an actor said: Ray wraps it, traceback and all."""
    return str(getattr(error, "cause", error))
