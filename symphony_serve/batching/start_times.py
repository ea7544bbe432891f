"""When a batch may start: `StartPolicy`. A batch starts at any moment between its earliest and its latest start.

The latest start is the same under every policy: the first deadline less the seconds of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from symphony_serve.batching import Candidate
from symphony_serve.errors import ServeError

#: Each policy, and its earliest start in words.
POLICIES = {
    "deferred": "when a request that comes later could not join the batch any more (Symphony, section 3.3)",
    "eager": "at once",
    "timeout": "`wait` seconds after its first request came, and at its latest start if that is sooner",
    "latest": "at its latest start",
}


@dataclass(frozen=True, slots=True)
class StartPolicy:
    """Says when a batch may start at the earliest.

    name: one of `POLICIES`. wait: seconds, only of ``timeout``. The paper prints the timeout without the limit at the
    latest start; a batch whose time-out is later than that would never start in time.
    """

    name: str = "deferred"
    wait: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise ServeError(f"start policy {self.name!r} is none of {', '.join(POLICIES)}")
        if not 0 <= self.wait < math.inf or (self.wait and self.name != "timeout"):
            raise ServeError(f"start policy {self.name} waits {self.wait} s; give 0 or more, and only with timeout")

    def earliest(self, candidate: Candidate) -> float:
        """The moment before which the batch does not start, if that moment is still to come."""
        if self.name == "deferred":
            return candidate.deadline - candidate.next_seconds
        if self.name == "eager":
            return -math.inf
        latest = candidate.deadline - candidate.seconds
        return latest if self.name == "latest" else min(candidate.arrival + self.wait, latest)


DEFERRED = StartPolicy("deferred")
EAGER = StartPolicy("eager")
LATEST = StartPolicy("latest")
