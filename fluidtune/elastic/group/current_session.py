"""Which session the loop of this process finds: `elastic.prepare` and the others ask `current`. Needs no torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .lazy_session import LazySession

if TYPE_CHECKING:
    from .session import ElasticSession

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
