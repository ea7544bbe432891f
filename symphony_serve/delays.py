"""How long the way to a GPU and back takes (appendix D). All times are seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from symphony_serve.errors import ServeError


@dataclass(frozen=True, slots=True)
class Delays:
    """The delays of the network. Each must be a high percentile (99.9 %): what takes longer makes batches late.

    control: from the decision to the backend. data: for each request of a batch, to fetch its input before the batch.
    response: from the backend to the frontend. jitter: by how much a batch may take longer than its profile says.
    """

    control: float = 0.0
    data: float = 0.0
    response: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ServeError(f"the delay {field.name} is {value}, expected seconds of 0 or more; measure it again")

    def sending(self, size: int) -> float:
        """Seconds from the decision until a batch of ``size`` can start on its GPU."""
        return self.control + self.data * size

    @property
    def margin(self) -> float:
        """By how many seconds a batch must end before its first deadline."""
        return self.response + self.jitter

    @property
    def smallest(self) -> float:
        """Seconds that a batch of 1 needs besides its time on the GPU."""
        return self.sending(1) + self.margin


#: All in one process.
NO_DELAYS = Delays()
