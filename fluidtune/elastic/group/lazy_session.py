"""A leader's session until its loop asks for it: a trial that never does needs no `ElasticSession` and no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fluidtune.group_facts import GroupFacts

from ..transport.membership import Reform

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

    def facts(self) -> GroupFacts:
        return GroupFacts() if self._made is None else self._made.facts()

    def fails_divided(self, error: BaseException) -> str | None:
        return None if self._made is None else self._made.fails_divided(error)

    def direct(self, reform: Reform) -> None:
        """See `LeaderSession`. RuntimeError before the session is elastic."""
        self._elastic().direct(reform)

    def boundary(self, done: int) -> int:
        """See `LeaderSession`. RuntimeError before the session is elastic."""
        return self._elastic().boundary(done)

    def leave(self) -> None:
        if self._made is not None:
            self._made.leave()

    def close(self) -> None:
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
