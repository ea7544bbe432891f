"""Run a user's function as a worker's loop in a thread of its own, and say how it ended.

The host (a worker process' main thread) keeps talking to the session meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .errors import GroupLost, Left

if TYPE_CHECKING:
    from .session import ElasticSession


@dataclass(frozen=True)
class Outcome:
    """How a loop ended: it returned ``value``, it left (asked to), it lost its group, or it raised
    ``error``.
    """

    kind: Literal["returned", "left", "lost", "failed"]
    value: Any = None
    error: BaseException | None = None


class LoopThread:
    """``fn(*args)`` under ``session``, in a daemon thread: the process can always end."""

    def __init__(self, session: ElasticSession, fn: Callable[..., Any], *args: Any) -> None:
        self._session = session
        self._fn = fn
        self._args = args
        self._outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._main, name=f"elastic {session.trial}", daemon=True)

    def start(self) -> LoopThread:
        self._thread.start()
        return self

    def join(self, timeout: float | None = None) -> Outcome | None:
        """Wait up to ``timeout`` seconds (None: without end) for the loop to end; None if it has not."""
        self._thread.join(timeout)
        return self.outcome

    @property
    def outcome(self) -> Outcome | None:
        """None while the loop runs."""
        return self._outcome

    def _main(self) -> None:
        try:
            self._outcome = Outcome("returned", value=self._session.run(self._fn, *self._args))
        except Left as error:
            self._outcome = Outcome("left", error=error)
        except GroupLost as error:
            self._outcome = Outcome("lost", error=error)
        except BaseException as error:
            self._outcome = Outcome("failed", error=error)
