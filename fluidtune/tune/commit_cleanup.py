"""What is left to do after trials ended for good: have Tune save that they did, then delete their commits.

Tune saves every ten seconds or so by itself; a driver killed in between would not know them finished, and needs their
commits. A worker that still cleans up may still write one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ray.tune.experiment import Trial

logger = logging.getLogger(__name__)

#: Tune is not asked to save its state more often than this, seconds.
SAVE_EVERY_S = 5.0


class Endings:
    """``save`` writes the state of all trials; ``delete`` deletes one trial's commits, or raises OSError."""

    def __init__(
        self, save: Callable[[], None], delete: Callable[[Trial], None], clock: Callable[[], float] = time.monotonic
    ):
        self._save, self._delete, self._clock = save, delete, clock
        self._unsaved: list[Trial] = []
        #: Their ends are saved, their commits still there.
        self._saved: list[Trial] = []
        self._settle_at = 0.0

    def add(self, trial: Trial) -> None:
        """The trial will never come back."""
        self._unsaved.append(trial)

    def settle(self, cleaning: bool) -> None:
        """Save, rarely enough to cost little, and delete what may go; ``cleaning``: a worker still cleans up."""
        began = self._clock()
        if self._unsaved and began >= self._settle_at:
            self._save()
            ended = self._clock()
            self._settle_at = ended + max(SAVE_EVERY_S, 50 * (ended - began))
            self._saved += self._unsaved
            self._unsaved.clear()
        if not cleaning:
            self._delete_saved()

    def wind_up(self, saved: bool) -> None:
        """The run is over: nothing is saved any more. ``saved``: Tune has just done so for all that ended."""
        if saved:
            self._saved += self._unsaved
        self._unsaved.clear()

    def close(self) -> None:
        """No worker is left."""
        self._delete_saved()

    def _delete_saved(self) -> None:
        for trial in self._saved:
            try:
                self._delete(trial)
            except OSError as error:
                logger.warning("FluidTune: the commits of ended trial %s stay where they are: %s", trial, error)
        self._saved.clear()
