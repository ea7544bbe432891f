"""Tune's snapshots of its state: when Tune is asked for one, and what follows once the run's storage has it.

Then commits need some results no more (`snapshot_pace`), the search has a new journal (`search_memory`), and the
commits of trials that have ended for good are deleted. If the driver is killed before that, the restored run takes such
a trial for unfinished and needs its commits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.tune.experiment import Trial

from fluidtune.ray_compat.controller import begin_to_save_state, is_pausing, note_no_encoded_objects
from fluidtune.ray_compat.whole_files import store_whole_files
from fluidtune.tune.search_memory import SearchMemory
from fluidtune.tune.snapshot_pace import SnapshotPace
from fluidtune.tune.trial_run import results_seen

logger = logging.getLogger(__name__)


class Snapshots:
    """Of the run of Tune's ``controller``. ``delete`` deletes the commits of a trial, if any, or raises an error."""

    def __init__(self, controller: Any, delete: Callable[[Trial], None]) -> None:
        self._controller, self._delete = controller, delete
        #: Which results of which trials the storage has, and when Tune is to save.
        self.pace = SnapshotPace(self._results_known)
        #: Called when Tune has written its state.
        self._on_state = [self.pace.state_written]
        #: Whether the storage has Tune's latest state.
        self.stored = True
        #: Trials that have ended; of how many of these the storage has that, and of how many the commits are gone.
        self._ended: list[Trial] = []
        self._ends_stored = self._deleted = 0
        self._over = False
        note_no_encoded_objects()
        store_whole_files(controller, self.state_written)

    def keep_search(self, memory: SearchMemory, folder: Path | None) -> None:
        """Snapshots, and ``folder`` if it is here, keep what the algorithm knows."""
        memory.start(folder, self.pace.news_came)
        self._on_state.append(memory.state_written)

    def state_written(self) -> Callable[[bool], None]:
        """See `whole_files.OnState`."""
        told, ended = [on_state() for on_state in self._on_state], len(self._ended)

        def stored(done: bool) -> None:
            self.stored = done
            self._ends_stored = max(self._ends_stored, ended if done else 0)
            for tell in told:
                tell(done)

        return stored

    def _results_known(self) -> dict[str, int]:
        """Up to which iteration the state that Tune writes now has each trial's results, as a restored run reads it."""
        return {trial.trial_id: results_seen(trial).delivered for trial in self._controller.get_trials()}

    def trial_ended(self, trial: Trial) -> None:
        """The trial will never come back."""
        self._ended.append(trial)
        self.pace.news_came()

    def save_if_due(self) -> None:
        """Have Tune write its state, if it is time. Once the run is over, trials that Tune stops have not ended."""
        if not self._over and self.pace.is_due(is_pausing(self._controller)):
            began = time.monotonic()
            begin_to_save_state(self._controller)
            self.pace.saved(time.monotonic() - began)

    def run_ended(self, saved: bool) -> None:
        """Tune's run is over. ``saved``: Tune has written its final state."""
        self._over = True
        if saved and self.stored:
            self._ends_stored = len(self._ended)

    def delete_commits(self) -> None:
        """Delete the commits of trials whose end the storage has, while no worker unloads a trial and may write one."""
        for trial in self._ended[self._deleted : self._ends_stored]:
            self._deleted += 1
            try:
                self._delete(trial)
            except Exception as error:  # the filesystems of fsspec raise errors of their own kinds
                logger.warning("FluidTune: the commits of ended trial %s stay where they are: %s", trial, error)
