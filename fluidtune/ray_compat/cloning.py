"""A further trial of Tune that is made from one that is there, and the search algorithm, which does not know of it."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.fs
from ray.train._internal.session import _TrainingResult
from ray.tune import Checkpoint
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.result import EXPR_PROGRESS_FILE, EXPR_RESULT_FILE

from fluidtune.ray_compat.controller import save_state

#: In a clone's directory: the checkpoint that it begins with. The cloned trial may delete its own.
FIRST_CHECKPOINT = "cloned_checkpoint"


def clone_of(trial: Trial, config: dict[str, Any], chosen: Mapping[str, Any], from_checkpoint: bool) -> Trial:
    """Return a new trial with all that the script has set for this one, which Tune does not know yet.

    ``config``: its whole configuration. ``chosen``: what of it is to be named as the search's choice.
    ``from_checkpoint``: it begins with a copy of the trial's last checkpoint.

    Its directory is made, so that nothing is saved of a trial that can have none. What the script's own functions and
    the file system raise comes through, and leaves nothing behind.
    """
    pattern = copy.copy(trial)
    pattern.config, pattern.evaluated_params = config, {**trial.evaluated_params, **chosen}
    # It becomes part of the directory's name, where a value of a user may have any length and any characters.
    pattern.experiment_tag = f"clone_of_{trial.trial_id}"
    clone = pattern.reset()
    # The copy of the trial's storage has what belongs to the trial.
    clone.storage.trial_dir_name, clone.storage.current_checkpoint_index = None, -1
    clone.init_local_path()
    if from_checkpoint:
        last = trial.latest_checkpoint_result
        path = Path(clone.storage.trial_fs_path, FIRST_CHECKPOINT).as_posix()
        files = clone.storage.storage_filesystem
        try:
            files.create_dir(path)
            pyarrow.fs.copy_files(
                last.checkpoint.path, path, source_filesystem=last.checkpoint.filesystem, destination_filesystem=files
            )
            for name in (EXPR_RESULT_FILE, EXPR_PROGRESS_FILE):  # Tune warns of a trial with a checkpoint without them
                files.open_output_stream(Path(clone.storage.trial_fs_path, name).as_posix()).close()
        except Exception:
            _remove_directories(clone)
            raise
        metrics = {**last.metrics, "trial_id": clone.trial_id, "config": config}
        clone._restore_checkpoint_result = _TrainingResult(Checkpoint(path, files), metrics)
    return clone


def add_clone(controller: TuneController, clone: Trial) -> None:
    """Let Tune have the trial. If that raises, as the script's algorithm or resources may, Tune has not got it."""
    try:
        controller.add_trial(clone)
    except Exception:
        if clone in controller._trials:
            controller._trials.remove(clone)
        controller._live_trials.discard(clone)
        _remove_directories(clone)
        raise


def _remove_directories(clone: Trial) -> None:
    shutil.rmtree(clone.local_path, ignore_errors=True)
    with contextlib.suppress(OSError):  # the storage has none
        clone.storage.storage_filesystem.delete_dir(clone.storage.trial_fs_path)


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
    """Have Tune save its state with what is new of the trial, and wait until that is in the run's storage.

    What the file system raises comes through, which Tune itself would only log.
    """
    controller._mark_trial_to_checkpoint(trial)
    save_state(controller)
