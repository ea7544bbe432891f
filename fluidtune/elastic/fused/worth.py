"""Whether it pays to train K trials as one: decided from measured seconds. Pure; who measures is not decided here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

#: How many iterations of each kind must have been measured before anything changes. Judgement: the fewest of which a
#: median leaves out one that was interrupted.
LEAST = 3
#: Trials that train alone begin to train as one from this gain on. Judgement: it is to pay for the change itself, and
#: medians of the same work differ by a tenth where other processes share the cores (``benchmarks.fused``).
BEGIN = 1.2
#: Trials that train as one go on so down to this gain: below it they lose.
STAY = 1.0


@dataclass(frozen=True)
class Measured:
    """Seconds of one trial's iteration: as one of K trials that train as one (``fused``), and by itself (``alone``).

    Both are a trial's part of the time of its core: the seconds in which K trials did an iteration each, divided by K.
    """

    fused: Sequence[float]
    alone: Sequence[float]

    def gain(self) -> float | None:
        """The seconds alone divided by those as one, by their medians. None: too few were measured.

        Raises:
            ValueError: a measured value is not a positive number of seconds.
        """
        for seconds in (*self.fused, *self.alone):
            if not 0 < seconds < math.inf:
                raise ValueError(f"an iteration of {seconds} s was measured: give positive seconds")
        if min(len(self.fused), len(self.alone)) < LEAST:
            return None
        return median(self.alone) / median(self.fused)


def pays(measured: Measured, now: bool) -> bool:
    """Whether to train as one from now on. ``now``: whether it is done now, which goes on while nothing is known."""
    gain = measured.gain()
    if gain is None:
        return now
    return gain > STAY if now else gain >= BEGIN
