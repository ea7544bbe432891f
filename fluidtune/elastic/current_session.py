"""Which session the loop of this process finds: `elastic.prepare` and the others ask `current`.

A trial whose loop never asks needs no `ElasticSession` (`LazySession`), and no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fluidtune.group_facts import GroupFacts

from .leader_session import LeaderSession

if TYPE_CHECKING:
    from .session import ElasticSession


class LazySession(LeaderSession):
    """A session that calls ``make`` when the loop first calls `fluidtune.elastic`, and delegates from then on.

    It is for trials that begin anew: one that goes on from a commit needs its `ElasticSession` at once.
    """

    def __init__(self, make: Callable[[], ElasticSession]) -> None:
        self._make = make
        self._made: ElasticSession | None = None

    def wake(self) -> ElasticSession:
        """The session itself, made by the first call. Called in the loop's thread."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def facts(self) -> GroupFacts:
        return GroupFacts() if self._made is None else self._made.facts()

    def boundary(self, done: int) -> int:
        """RuntimeError before the session is elastic."""
        if self._made is None:
            raise RuntimeError("this trial's loop has not called fluidtune.elastic: it has no boundaries")
        return self._made.boundary(done)

    def leave(self) -> None:
        if self._made is not None:
            self._made.leave()

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


_session: ElasticSession | LazySession | None = None


def use(session: ElasticSession | LazySession | None) -> None:
    """Make this the process' session; None: it has none.

    Raises:
        RuntimeError: another session is in use.
    """
    global _session
    if session is not None and _session is not None and _session is not session:
        raise RuntimeError("the session of another trial is in use in this process: call elastic.use(None) first")
    _session = session


def current() -> ElasticSession | None:
    """The session in use in this process, or None. A `LazySession` wakes by this call, in this thread."""
    session = _session
    return session.wake() if isinstance(session, LazySession) else session
