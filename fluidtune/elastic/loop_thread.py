"""Shim until the driver side is merged. Runs a function as a follower's loop in a thread, and says how it ended.

The host (the worker process' main thread) keeps talking to the session meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .errors import GroupLost, Left


@dataclass(frozen=True)
class LoopOutcome:
    """How a loop ended.

    ``kind``: it "returned" ``value``; it "left", because it was asked to; it "lost" its group; or it "failed", which
    means that it raised ``error``.
    """

    kind: Literal["returned", "left", "lost", "failed"]
    value: Any = None
    error: BaseException | None = None


class LoopThread:
    """Runs ``fn(*args)`` under ``session`` in a daemon thread, which cannot keep the process from ending."""

    def __init__(self, session: Any, fn: Callable[..., Any], *args: Any) -> None:
        self._session, self._fn, self._args = session, fn, args
        self.outcome: LoopOutcome | None = None  # None while the loop runs
        self._thread = threading.Thread(target=self._main, name=f"elastic {session.trial}", daemon=True)

    def start(self) -> LoopThread:
        self._thread.start()
        return self

    def join(self, timeout: float | None = None) -> LoopOutcome | None:
        """Wait up to ``timeout`` seconds (None: for ever) for the loop's end. Returns None if it has not ended."""
        self._thread.join(timeout)
        return self.outcome

    def _main(self) -> None:
        try:
            self.outcome = LoopOutcome("returned", value=self._session.run(self._fn, *self._args))
        except Left as error:
            self.outcome = LoopOutcome("left", error=error)
        except GroupLost as error:
            self.outcome = LoopOutcome("lost", error=error)
        except BaseException as error:
            self.outcome = LoopOutcome("failed", error=error)
