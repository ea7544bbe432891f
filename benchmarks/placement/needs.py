"""What a replica of a model needs of a GPU at each batch size: compute, memory, bandwidth, and the seconds of a batch.

The rules are USHER's (Shubha, Shen, Iyer, OSDI'24); docs/placement.md tells them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

#: A GPU in millionths.
FULL = 1_000_000
#: Batches at which a plan may run a model. Source: USHER, algorithm 1.
BATCHES = (4, 8, 16, 32, 64, 128)


class Need(NamedTuple):
    """Parts of a GPU, 0 to 1, at this batch. seconds: of a batch. bandwidth: of memory; 0 where it is not known."""

    batch: int
    compute: float
    memory: float
    seconds: float
    bandwidth: float = 0.0

    @property
    def capacity(self) -> float:
        """Requests per second."""
        return self.batch / self.seconds


def whole(part: float) -> int:
    """A part of a GPU in millionths, rounded up, so that sums are exact and never too small."""
    return math.ceil(part * FULL - 1e-3)
