"""By how many seconds a batch must end before its first deadline. All times are seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from symphony_serve.errors import ServeError


@dataclass(frozen=True, slots=True)
class Delays:
    """The delays besides the device's time. Each must be a high percentile: what takes longer makes batches late.

    response: from the end of a batch to its requests' answers. jitter: by how much a batch may start late.
    """

    response: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ServeError(f"the delay {field.name} is {value}, expected seconds of 0 or more; measure it again")

    @property
    def margin(self) -> float:
        """By how many seconds a batch must end before its first deadline."""
        return self.response + self.jitter


#: Of a virtual clock.
NO_DELAYS = Delays()
