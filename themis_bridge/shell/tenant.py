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
from collections import defaultdict, deque
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
#: Leases of one GPU whose groups are kept: the last one may be asked for while the next one begins.
KEPT_GROUPS = 2
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
        `messages.Heard`.

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
        #: GPU -> (token, the placement group) of its last leases.
        self._groups: dict[str, deque[tuple[int, Any]]] = defaultdict(lambda: deque(maxlen=KEPT_GROUPS))
        #: Shows Ray, and through it the arbiter, that this driver lives; None before it first finds an arbiter.
        self._life: Any = None
        #: Whether to look for the arbiter and for the sign of life before the next message: one of them may be gone.
        self._unsure = True
        #: Why the arbiter refused something last.
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

    def group(self, gpu: str, token: int) -> Any:
        """The placement group of a lease. When the lease is over, Ray refuses to start anything in it."""
        return next(group for known, group in self._groups[gpu] if known == token)

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

    # --- joining

    def _register(self) -> None:
        deadline = time.monotonic() + JOIN_S
        while trouble := self._try_to_join():
            if time.monotonic() > deadline:
                raise ThemisError(f"{trouble} (arbiter of this Ray cluster)")
            if trouble != self._said:
                self._said = trouble
                logger.warning("themis: %s; trying to join for up to %.0f s", trouble, JOIN_S)
            time.sleep(JOIN_PAUSE_S)

    def _try_to_join(self) -> str:
        """Returns why the job has not joined; "": it has. Raises ThemisError if it never can."""
        self._unsure = True
        try:
            answer = self._ask()
        except WrongArbiter as error:
            raise ThemisError(_plain(error)) from None
        except ThemisError as error:
            return self._not_taken(error)
        except ray.exceptions.GetTimeoutError:
            return f"the arbiter has not answered within {ANSWER_S:g} s"
        except Exception as error:
            # Whatever Ray raises at one place, it may not raise again.
            return f"the arbiter does not answer: {type(error).__name__}: {error}"
        if isinstance(answer, m.Refused):
            return answer.why
        self._take(answer)
        return ""

    def _find_arbiter(self) -> None:
        """Find the arbiter, also one that Ray has restarted, or start one. It is shown that this driver lives."""
        self._arbiter = control.start(self._unit)
        if not hasattr(self._arbiter, "hear"):
            raise WrongArbiter(
                "the arbiter of this Ray cluster is of an earlier version: stop it (fluidtune arbiter stop), and start "
                "this job again"
            )
        if self._life is None or reservations.is_gone(self._agent.life):
            self._life = reservations.sign_of_life()
            self._agent.life = reservations.id_of(self._life)
        self._unsure = False

    # --- the thread

    def _loop(self) -> None:
        while not self._over.wait(POLL_S) and not self._agent.refused:
            if not ray.is_initialized():
                return  # The driver has left its cluster; a call would make Ray start a new one.
            try:
                self._take(self._ask())
            except WrongArbiter as error:
                self._agent.refused = _plain(error)
            except ThemisError as error:
                self._take(m.Refused(self._not_taken(error), ends=False))
            except (ray.exceptions.RayError, ValueError) as error:
                logger.warning("themis: the arbiter does not answer (%s); the job goes on", type(error).__name__)
                self._unsure = True
            except Exception:
                # Without this thread the job would lose its leases one by one.
                logger.exception("themis: the agent of %s failed; it goes on", self.app)

    def _not_taken(self, error: ThemisError) -> str:
        return f"the arbiter cannot take the report of {self.app}: {_plain(error)}"

    def _ask(self) -> m.Leases | m.Refused | None:
        """Say how things are with the job. Returns the arbiter's answer."""
        if self._unsure:
            self._find_arbiter()
        with self._lock:
            heard = self._agent.heartbeat()
        answer: m.Leases | m.Refused | None = ray.get(self._arbiter.hear.remote(heard), timeout=ANSWER_S)
        return answer

    def _take(self, answer: m.Leases | m.Refused | None) -> None:
        if isinstance(answer, m.Refused) and answer.why != self._said:
            self._said = answer.why
            logger.warning("themis: %s", self._said)
        with self._lock:
            for notice in self._agent.take(answer):
                if isinstance(notice, Gained):
                    group = reservations.by_id(self._agent.leases[notice.gpu.id].group)
                    self._groups[notice.gpu.id].append((notice.token, group))
                # The arbiter may have taken the driver for dead, because Ray has removed its sign of life.
                self._unsure |= isinstance(notice, Lost)
                self._notices.append(notice)


def _plain(error: ThemisError) -> str:
    """The message of an actor's error, without the traceback into which Ray wraps it."""
    return str(getattr(error, "cause", error))
