"""A further trial of Tune that is made from one that is there, and the search algorithm, which does not know of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.fs
from ray.train._internal.session import _TrainingResult
from ray.tune import Checkpoint
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial

#: In a clone's directory: the checkpoint that it begins with. The cloned trial may delete its own.
FIRST_CHECKPOINT = "cloned_checkpoint"


def clone_of(trial: Trial, config: dict[str, Any], chosen: Mapping[str, Any], from_checkpoint: bool) -> Trial:
    """Return a new trial with all that the script has set for this one, which Tune does not know yet.

    ``config``: its whole configuration. ``chosen``: what of it is to be named as the search's choice.
    ``from_checkpoint``: it begins with a copy of the trial's last checkpoint.

    Raises:
        OSError: the checkpoint is not there any more, or cannot be copied.
    """
    pattern = copy.copy(trial)
    pattern.config, pattern.evaluated_params = config, {**trial.evaluated_params, **chosen}
    values = ",".join(f"{name}={value}" for name, value in chosen.items())
    pattern.experiment_tag = f"clone_of_{trial.trial_id}" + (f"_{values}" if values else "")
    clone = pattern.reset()
    # The copy of the trial's storage has what belongs to the trial.
    clone.storage.trial_dir_name, clone.storage.current_checkpoint_index = None, -1
    if from_checkpoint:
        clone.init_local_path()
        last = trial.latest_checkpoint_result
        path = Path(clone.storage.trial_fs_path, FIRST_CHECKPOINT).as_posix()
        files = clone.storage.storage_filesystem
        files.create_dir(path)
        pyarrow.fs.copy_files(
            last.checkpoint.path, path, source_filesystem=last.checkpoint.filesystem, destination_filesystem=files
        )
        metrics = {**last.metrics, "trial_id": clone.trial_id, "config": config}
        clone._restore_checkpoint_result = _TrainingResult(Checkpoint(path, files), metrics)
    return clone


class SearchBeside:
    """The run's search algorithm, which hears nothing of ``others``, trials that it has not made.

    Tune lets trials be added by hand, and expects that the algorithm tells them from its own. Optuna's does not.
    """

    def __init__(self, made: Any) -> None:
        self._made = made
        #: The ids of the other trials.
        self.others: set[str] = set()

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if trial_id not in self.others:
            self._made.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if trial_id not in self.others:
            self._made.on_trial_complete(trial_id, result=result, error=error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


def hide_from_search(controller: TuneController, trial: Trial) -> None:
    """From now on the search algorithm hears nothing of the trial."""
    if not isinstance(controller._search_alg, SearchBeside):
        controller._search_alg = SearchBeside(controller._search_alg)
    controller._search_alg.others.add(trial.trial_id)


def save_now(controller: TuneController, trial: Trial) -> None:
    """Have Tune save its state with what is new of the trial, and wait until that is in the run's storage."""
    controller._mark_trial_to_checkpoint(trial)
    controller.checkpoint(force=True, wait=True)
