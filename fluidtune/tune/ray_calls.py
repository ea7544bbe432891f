"""The driver's calls to workers that are under way: every call is a Ray future with one handler.

It decides nothing. The manager waits here; the handlers belong to those that made the calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorPlacementGroupRemoved, ActorUnschedulableError, RayActorError

#: Tune's loop calls us again at least this often while no call is under way, seconds.
IDLE_WAIT_S = 0.1


class DeviceRevoked(RayActorError):
    """The placement group that held the worker's device was removed: no worker can live there any more."""


class RayCalls:
    """Futures and their handlers. A handler gets the call's value, or the exception that the call raised."""

    def __init__(self) -> None:
        self._handlers: dict[Any, Callable[[Any], None]] = {}

    def track_call(self, future: Any, handler: Callable[[Any], None]) -> None:
        """Call ``handler`` with the result of ``future`` when it is there."""
        self._handlers[future] = handler

    def drop_call(self, future: Any) -> None:
        """Forget the future: its result is of no interest any more."""
        self._handlers.pop(future, None)

    def wait_for_one(self, timeout: float | None) -> None:
        """Handle at most one call that returns within ``timeout`` seconds; None waits until one returns."""
        if not self._handlers:
            time.sleep(min(IDLE_WAIT_S, timeout or 0.0))
            return
        ready, _ = ray.wait(list(self._handlers), num_returns=1, timeout=timeout)
        for future in ready:
            self.resolve_call(future)

    def resolve_call(self, future: Any) -> None:
        """Wait for this call to return, and handle it."""
        handler = self._handlers.pop(future)
        try:
            value = ray.get(future)
        except (ActorPlacementGroupRemoved, ActorUnschedulableError) as error:
            value = DeviceRevoked(error_msg=str(error))
        except Exception as error:
            value = error
        handler(value)

    def close(self) -> None:
        """Forget all calls."""
        self._handlers.clear()
