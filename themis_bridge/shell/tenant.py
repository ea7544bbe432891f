"""A tuning job as a tenant of the arbiter: the job's agent, and a thread of the driver that keeps it in touch.

The job's executor calls `Tenant.poll`, which returns the GPUs that it gained, has to leave, and lost. While the arbiter
is away the job keeps all that it holds, because only the arbiter removes reservations.
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
from themis_bridge.errors import ThemisError, WrongArbiter
from themis_bridge.settings import Settings
from themis_bridge.shell import control, reservations

logger = logging.getLogger(__name__)

#: Seconds between two exchanges with the arbiter, so that answers are in time.
POLL_S = Settings.answer_s / 10
#: Seconds after which a call of the arbiter counts as failed: well above an exchange, below the patience.
ANSWER_S = 10.0
#: For this many seconds a job tries to join: after a restart of the job the arbiter refuses it until it knows that the
#: former driver is dead, and a busy arbiter answers late.
JOIN_S = 1.5 * Settings.patience_s
#: Seconds between two attempts to join.
JOIN_PAUSE_S = 1.0


class Tenant:
    """See the module.

    app: name of the job.
    work: says what the job still has to do.
    bundle: Ray resource -> amount, what one device reserves: one GPU (or core) and what it needs beside it.
    unit: "GPU" or "CPU", what the job wants to lease.
    user: whose job it is, together: how many GPUs of one node each of its trials needs at once; see
        `messages.Heartbeat`.

    Raises:
        ThemisError: the name is not allowed or another job has it, or the arbiter does not lease such devices.
    """

    def __init__(self, app: str, work: Work, bundle: Mapping[str, float], unit: str, user: str = "", together: int = 1):
        reservations.check_app_name(app)
        self.app, self._unit = app, unit
        # One session for all attempts to join: a message that was given up may still arrive.
        self._agent = Agent(app, f"{app}/{uuid.uuid4().hex[:8]}", work, user, together, bundle)
        self._lock = threading.Lock()
        self._notices: list[Notice] = []
        #: Shows Ray, and through it the arbiter, that this driver lives; None before it first finds an arbiter.
        self._life: Any = None
        #: Whether to look for the arbiter and for the sign of life before the next message: one of them may be gone.
        self._unsure = True
        #: What was wrong at the last exchange.
        self._said = ""
        self._over = threading.Event()
        try:
            self._register()
        except BaseException:
            self._remove_sign_of_life()
            raise
        self._thread = threading.Thread(target=self._loop, name="themis-agent", daemon=True)
        self._thread.start()

    def poll(self) -> list[Notice]:
        """What happened since the last call. A GPU counts as gained once Ray has reserved it.

        Raises:
            ThemisError: the arbiter has refused this job for good.
        """
        if self._agent.refused:
            raise ThemisError(self._agent.refused)
        with self._lock:
            notices, self._notices = self._notices, []
        return notices

    @property
    def expects(self) -> bool:
        """Whether further GPUs are on their way to this job; False if it needs no gangs."""
        return self._agent.promised > 0

    def group(self, lease: Gained) -> Any:
        """The placement group of a lease. When the lease is over, Ray refuses to start anything in it."""
        return reservations.by_id(lease.group)

    def vacated(self, gpu: str, token: int) -> None:
        """Nothing of this job runs under that lease of the GPU any more, so another job may have the GPU."""
        with self._lock:
            self._agent.vacated(gpu, token)

    def close(self) -> None:
        """The job is done: give all its GPUs back."""
        self._over.set()
        self._thread.join(ANSWER_S)
        try:
            ray.get(self._arbiter.leave.remote(self.app, self._agent.session), timeout=ANSWER_S)
        except Exception as error:
            logger.warning("themis: the arbiter was not told that %s has ended (%s)", self.app, type(error).__name__)
        self._remove_sign_of_life()

    def _remove_sign_of_life(self) -> None:
        if self._life is not None and ray.is_initialized():
            # Ray removes it when this process ends.
            with contextlib.suppress(Exception):
                reservations.remove(self._life)

    # --- talking with the arbiter

    def _register(self) -> None:
        deadline = time.monotonic() + JOIN_S
        while trouble := self._exchange():
            if time.monotonic() > deadline:
                raise ThemisError(f"{trouble} (arbiter of this Ray cluster)")
            self._log(f"{trouble}; trying to join for up to {JOIN_S:.0f} s")
            self._agent.refused = None  # What ends a job ends no attempt to join.
            time.sleep(JOIN_PAUSE_S)

    def _loop(self) -> None:
        while not self._over.wait(POLL_S) and not self._agent.refused:
            if not ray.is_initialized():
                return  # The driver has left its cluster; a call would make Ray start a new one.
            try:
                self._log(self._exchange())
            except ThemisError as error:
                self._agent.refused = str(error)

    def _exchange(self) -> str:
        """Say how things are with the job, and take the answer. Returns what is wrong; "": nothing is.

        Raises:
            ThemisError: the job and the arbiter do not fit together.
        """
        unsure, self._unsure = self._unsure, True
        try:
            if unsure:
                self._find_arbiter()
            with self._lock:
                heard = self._agent.heartbeat()
            answer = ray.get(self._arbiter.hear.remote(heard), timeout=ANSWER_S)
            with self._lock:
                notices = self._agent.take(answer)
                self._notices += notices
        except WrongArbiter as error:
            raise ThemisError(_plain(error)) from None
        except ThemisError as error:
            return f"the arbiter cannot take the report of {self.app}: {_plain(error)}"
        except ray.exceptions.GetTimeoutError:
            return f"the arbiter has not answered within {ANSWER_S:g} s"
        except Exception as error:
            # Whatever Ray raises at one place, it may not raise again; without the agent the job would lose its leases.
            return f"the arbiter does not answer: {type(error).__name__}: {error}"
        refused = isinstance(answer, m.Refused)
        # The arbiter may have taken the driver for dead, because Ray has removed its sign of life.
        self._unsure = refused or any(isinstance(notice, Lost) for notice in notices)
        return answer.why if refused else ""

    def _log(self, trouble: str) -> None:
        if trouble and trouble != self._said:
            logger.warning("themis: %s", trouble)
        self._said = trouble

    def _find_arbiter(self) -> None:
        """Find the arbiter, also one that Ray has restarted, or start one. It is shown that this driver lives."""
        self._arbiter = control.start(self._unit)
        if not hasattr(self._arbiter, "hear"):
            raise WrongArbiter(
                "the arbiter of this Ray cluster is of an earlier version: stop it (fluidtune arbiter stop), and start "
                "this job again"
            )
        if self._life is None or reservations.is_gone(self._agent.life):
            life = reservations.sign_of_life()
            self._agent.life, self._life = reservations.id_of(life), life


def _plain(error: ThemisError) -> str:
    """The message of an actor's error, without the traceback into which Ray wraps it."""
    return str(getattr(error, "cause", error))
