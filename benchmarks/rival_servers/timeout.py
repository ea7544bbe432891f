"""Starts by a time-out, as TensorFlow Serving and `serve.batch` have them, with our scheduler and matching."""

from __future__ import annotations

from symphony_serve.batching import Candidate
from symphony_serve.batching.window import Window
from symphony_serve.model_side import Gathering


def with_timeout(gathering: type[Window], wait: float) -> Gathering:
    """The gathering, for deferred starts: its batches start ``wait`` seconds after their first request came.

    They start at their latest start if that is sooner. The paper prints the time-out without this limit; a batch whose
    time-out is later would never start in time.
    """

    class Timeout(gathering):  # type: ignore[misc, valid-type]
        def form(self, start: float) -> Candidate | None:
            candidate = super().form(start)
            if candidate is None:
                return None
            earliest = self._queue[self._head][2].arrival + wait
            return candidate._replace(next_seconds=max(candidate.seconds, candidate.deadline - earliest))

    return Timeout
