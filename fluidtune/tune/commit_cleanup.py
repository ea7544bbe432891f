"""When the commits of a trial that has ended for good are deleted: once the run's storage has that it ended.

If the driver is killed before that, the restored run takes the trial for unfinished and needs its commits. Nor is
anything deleted while a worker cleans up: it may still write a commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ray.tune.experiment import Trial

logger = logging.getLogger(__name__)


class CommitCleanup:
    """``delete`` deletes a trial's commits, or raises an error."""

    def __init__(self, delete: Callable[[Trial], None]):
        self._delete = delete
        #: Trials that have ended; of how many of these the storage has that, and of how many the commits are gone.
        self._ended: list[Trial] = []
        self._stored = self._deleted = 0

    def trial_ended(self, trial: Trial) -> None:
        """The trial, which may have commits, will never come back."""
        self._ended.append(trial)

    def state_written(self) -> Callable[[bool], None]:
        """Tune has written its state. See `whole_files.OnState`."""
        ended = len(self._ended)

        def stored(done: bool) -> None:
            self._stored = max(self._stored, ended if done else 0)

        return stored

    def run_ended(self) -> None:
        """The run is over, and the storage has Tune's final state."""
        self._stored = len(self._ended)

    def delete_stored(self) -> None:
        """Delete the commits of trials whose end the storage has."""
        for trial in self._ended[self._deleted : self._stored]:
            self._deleted += 1
            try:
                self._delete(trial)
            except Exception as error:  # the filesystems of fsspec raise errors of their own kinds
                logger.warning("FluidTune: the commits of ended trial %s stay where they are: %s", trial, error)
