"""A leader's session until its loop asks for it. A trial that never does needs neither a session nor torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import ElasticSession

#: What a host reads of a session whose loop is not elastic so far.
_ASLEEP = {"leader": True, "is_elastic": False, "width": 1, "last_reform": None, "address": None, "mends": False}


class DormantSession:
    """Stands for the `ElasticSession` that ``make`` makes, when the loop first calls `fluidtune.elastic`."""

    def __init__(self, make: Callable[[], ElasticSession]) -> None:
        self._make = make
        self._awake: ElasticSession | None = None

    def wake(self) -> ElasticSession:
        """The session itself. In the loop's thread."""
        if self._awake is None:
            self._awake = self._make()
        return self._awake

    def leave(self) -> None:
        """See `ElasticSession`; asleep there is nothing to end."""
        if self._awake is not None:
            self._awake.leave()

    def close(self) -> None:
        """See `ElasticSession`; asleep there is nothing to end."""
        if self._awake is not None:
            self._awake.close()

    def forget_resume(self) -> None:
        """See `ElasticSession`; one that goes on from a commit is never dormant."""

    def __getattr__(self, name: str) -> Any:
        awake = self.__dict__.get("_awake")
        if awake is not None:
            return getattr(awake, name)
        if name in _ASLEEP:
            return _ASLEEP[name]
        raise AttributeError(f"the session of a loop that is not elastic so far has no {name!r}")


_pending: DormantSession | None = None


def await_call(session: DormantSession | None) -> None:
    """This process' loop wakes ``session`` when it first asks for it; None: nothing waits any more."""
    global _pending
    _pending = session


def pending() -> DormantSession | None:
    """The session that waits for this process' loop."""
    return _pending
