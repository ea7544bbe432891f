"""A leader's session until its loop asks for it: a trial that never does needs no `ElasticSession` and no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..random_streams import Streams
from ..transport.membership import Address, Reform

if TYPE_CHECKING:
    from .session import ElasticSession


class LazySession:
    """A `LeaderSession` that calls ``make`` when the loop first calls `fluidtune.elastic`, and delegates from then on.

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

    @property
    def is_elastic(self) -> bool:
        """See `LeaderSession`."""
        return self._made is not None and self._made.is_elastic

    @property
    def address(self) -> Address | None:
        """See `LeaderSession`."""
        return None if self._made is None else self._made.address

    @property
    def streams(self) -> Streams | None:
        """See `LeaderSession`."""
        return None if self._made is None else self._made.streams

    @property
    def width(self) -> int:
        """See `LeaderSession`."""
        return 1 if self._made is None else self._made.width

    @property
    def last_reform(self) -> tuple[float, float] | None:
        """See `LeaderSession`."""
        return None if self._made is None else self._made.last_reform

    @property
    def ungrowable(self) -> str | None:
        """See `LeaderSession`."""
        return None if self._made is None else self._made.ungrowable

    @property
    def refused(self) -> float | None:
        """See `LeaderSession`."""
        return None if self._made is None else self._made.refused

    @property
    def lost(self) -> str | None:
        """See `LeaderSession`."""
        return None if self._made is None else self._made.lost

    def fails_divided(self, error: BaseException) -> str | None:
        """See `LeaderSession`."""
        return None if self._made is None else self._made.fails_divided(error)

    def take_difference(self) -> str | None:
        """See `LeaderSession`."""
        return None if self._made is None else self._made.take_difference()

    @property
    def mends(self) -> bool:
        """See `LeaderSession`."""
        return self._made is not None and self._made.mends

    @property
    def committing(self) -> bool:
        """See `LeaderSession`."""
        return self._made is not None and self._made.committing

    def direct(self, reform: Reform) -> None:
        """See `LeaderSession`. RuntimeError before the session is elastic."""
        self._elastic().direct(reform)

    def boundary(self, done: int) -> int:
        """See `LeaderSession`. RuntimeError before the session is elastic."""
        return self._elastic().boundary(done)

    def leave(self) -> None:
        """See `WorkerSession`."""
        if self._made is not None:
            self._made.leave()

    def close(self) -> None:
        """See `WorkerSession`."""
        if self._made is not None:
            self._made.close()

    def forget_resume(self) -> None:
        """Nothing to do: there is no commit."""

    def outrun_resume(self) -> None:
        """Nothing to do: there is no commit."""

    def recall(self) -> None:
        """Nothing to do: there is no commit."""

    def _elastic(self) -> ElasticSession:
        if self._made is None:
            raise RuntimeError("this trial's loop has not called fluidtune.elastic: it cannot be resized")
        return self._made
