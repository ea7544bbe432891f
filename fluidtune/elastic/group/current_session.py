"""Which session the loop of this process finds: `elastic.prepare` and the others ask `current`.

A trial whose loop never asks needs no `ElasticSession` (`LazySession`), and no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fluidtune.group_facts import GroupFacts, Reform

from .worker_session import LeaderSession

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

    def fails_divided(self, error: BaseException) -> str | None:
        return None if self._made is None else self._made.fails_divided(error)

    def direct(self, reform: Reform) -> None:
        self._elastic().direct(reform)

    def boundary(self, done: int) -> int:
        return self._elastic().boundary(done)

    def leave(self) -> None:
        if self._made is not None:
            self._made.leave()

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _elastic(self) -> ElasticSession:
        """RuntimeError before the session is elastic."""
        if self._made is None:
            raise RuntimeError("this trial's loop has not called fluidtune.elastic: it cannot be resized")
        return self._made


_session: ElasticSession | None = None
_pending: LazySession | None = None
_of_thread = threading.local()


def use(session: ElasticSession | None) -> None:
    """Make this the process' session; None: it has none.

    Raises:
        RuntimeError: another session is in use.
    """
    global _session
    if session is not None and _session is not None and _session is not session:
        raise RuntimeError(f"this process already runs trial {_session.trial}: use(None) first")
    _session = session


def wake_on_first_use(session: LazySession | None) -> None:
    """Let the first call of `current` wake ``session``; None: no session waits for it."""
    global _pending
    _pending = session


@contextmanager
def use_in_this_thread(session: ElasticSession) -> Iterator[None]:
    """Let this thread find another session than the rest of the process (`rehearsal`)."""
    _of_thread.session = session
    try:
        yield
    finally:
        _of_thread.session = None


def current() -> ElasticSession | None:
    """The session in use in this process, or None. A `LazySession` that waits for this call wakes, in this thread."""
    global _pending
    of_thread: ElasticSession | None = getattr(_of_thread, "session", None)
    if of_thread is not None:
        return of_thread
    if _pending is not None:
        lazy, _pending = _pending, None
        use(lazy.wake())
    return _session
