"""A device that a trial uses as well, on the virtual clock. All times are seconds.

The trial runs one iteration after the other. A batch that was sent starts when the iteration that runs has ended, and
before the next one. So it waits for one iteration at most.
"""

from __future__ import annotations

import math

from symphony_serve.messages import SAME_MOMENT_S, Dispatch
from symphony_serve.profiles import Profile


class Beside:
    """The turns of one trial and one served model. Its `takes` is what `Simulation` asks.

    profile: of the model when nobody else uses the device. iteration: the seconds of each iteration of the trial.
    """

    def __init__(self, profile: Profile, iteration: float):
        self._profile, self._iteration = profile, iteration
        #: Since when the trial runs, one iteration after the other.
        self._since = 0.0
        #: Iterations that have ended, and seconds of batches.
        self.iterations, self.served = 0, 0.0

    def takes(self, batch: Dispatch) -> float:
        """Seconds from the batch's start, as the scheduler sees it, until its end."""
        elapsed = batch.start - self._since
        ended = max(0, math.ceil((elapsed - SAME_MOMENT_S) / self._iteration))
        wait = max(0.0, ended * self._iteration - elapsed)
        seconds = self._profile.seconds(len(batch.requests))
        self.iterations += ended
        self.served += seconds
        self._since = batch.start + wait + seconds
        return wait + seconds

    @property
    def now(self) -> float:
        """When the last batch has ended."""
        return self._since
