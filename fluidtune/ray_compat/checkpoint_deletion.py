"""A trial's checkpoint from which another trial is to go on is deleted when that one has a newer checkpoint.

Population-based training gives a weak trial the newest checkpoint of a strong one, which goes on meanwhile, and with a
small ``num_to_keep`` deletes it. Stock Ray Tune warns of that (``CheckpointConfig.num_to_keep <= 2``).
"""

from __future__ import annotations

import weakref
from typing import Any

from ray.train._internal import checkpoint_manager
from ray.tune.execution.tune_controller import TuneController

#: What Tune deletes checkpoints with, of all runs of this process.
_delete = checkpoint_manager._delete_fs_path
_runs: weakref.WeakSet[TuneController] = weakref.WeakSet()
#: What is to be deleted as soon as no trial goes on from it: file systems and paths.
_due: dict[str, Any] = {}


def keep_what_trials_go_on_from(controller: TuneController) -> None:
    """Have the checkpoint from which a trial of this run would be restored stay until it would be from another one."""
    _runs.add(controller)
    checkpoint_manager._delete_fs_path = _delete_unless_needed


def _delete_unless_needed(fs: Any, fs_path: str) -> None:
    _due[fs_path] = fs
    delete_what_is_due()


def delete_what_is_due() -> None:
    """Delete the checkpoints from which no trial goes on any more."""
    trials = [trial for run in list(_runs) for trial in list(run.get_live_trials())]  # runs may have a thread each
    needed = {trial.checkpoint.path for trial in trials if trial.checkpoint is not None}
    for path in _due.keys() - needed:
        _delete(fs=_due.pop(path), fs_path=path)
