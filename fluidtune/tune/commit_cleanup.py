"""When the commits of a trial that ended for good are deleted: after Tune has saved that the trial ended.

Tune saves about every ten seconds by itself. If the driver is killed before that, the restored run takes the trial for
unfinished and needs its commits. Nor is anything deleted while a worker cleans up: it may still write a commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ray.tune.experiment import Trial

logger = logging.getLogger(__name__)

#: Tune is asked to save its state at most this often, seconds.
SAVE_EVERY_S = 5.0
#: The next save waits at least this many times as long as the last one took, so that saving costs 2 % of the time.
SAVE_PAUSE = 50


class CommitCleanup:
    """When which commits go.

    ``save`` has Tune write the state of all trials into the run's storage, or raises what prevents that.
    ``has_commits``: whether a trial may have any. ``delete`` deletes a trial's commits, or raises an error.
    """

    def __init__(
        self,
        save: Callable[[], None],
        has_commits: Callable[[Trial], bool],
        delete: Callable[[Trial], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._save, self._has_commits, self._delete, self._clock = save, has_commits, delete, clock
        #: Trials that ended since Tune last saved.
        self._unsaved: list[Trial] = []
        #: Trials whose end Tune has saved and whose commits are still there.
        self._saved: list[Trial] = []
        #: The last save failed.
        self._fails = False
        #: When Tune may be asked to save again.
        self._next_save = 0.0

    def trial_ended(self, trial: Trial) -> None:
        """The trial will never come back."""
        self._unsaved.append(trial)

    def save_and_delete(self, unloading: bool) -> None:
        """Save, rarely enough to cost little, and delete what may go. ``unloading``: a worker unloads a trial."""
        began = self._clock()
        if self._unsaved and began >= self._next_save:
            self._save_ends()
            ended = self._clock()
            self._next_save = ended + max(SAVE_EVERY_S, SAVE_PAUSE * (ended - began))
        if not unloading:
            self._delete_saved()

    def run_ended(self, saved: bool) -> None:
        """The run is over, and this object saves nothing any more. ``saved``: Tune says that its final state is saved.

        Tune only logs that it could not write into the run's storage. Where commits depend on it, it saves once more.
        """
        if saved and any(self._has_commits(trial) for trial in self._unsaved):
            self._save_ends()
        self._unsaved.clear()

    def close(self) -> None:
        """No worker is left: delete the commits of all trials whose end is saved."""
        self._delete_saved()

    def _save_ends(self) -> None:
        try:
            self._save()
        except Exception as error:  # the filesystems of fsspec raise errors of their own kinds
            if not self._fails:
                logger.warning("FluidTune: commits of ended trials stay, as Tune's state cannot be saved: %s", error)
            self._fails = True
        else:
            self._fails = False
            self._saved += filter(self._has_commits, self._unsaved)
            self._unsaved.clear()

    def _delete_saved(self) -> None:
        for trial in self._saved:
            try:
                self._delete(trial)
            except Exception as error:
                logger.warning("FluidTune: the commits of ended trial %s stay where they are: %s", trial, error)
        self._saved.clear()
