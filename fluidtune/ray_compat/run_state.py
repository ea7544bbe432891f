"""The trials of a run and its search, as Ray Tune has written them down, without the results that they have reported.

`ExperimentAnalysis` also makes a table of each trial's ``result.json``, which takes seconds where trials have reported
thousands of results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.fs
from ray.train._internal.storage import get_fs_and_path
from ray.tune import ExperimentAnalysis
from ray.tune.execution.experiment_state import _find_newest_experiment_checkpoint
from ray.tune.experiment import Trial

from fluidtune.ray_compat.controller import SEARCH


class _WithoutResults(ExperimentAnalysis):
    def _fetch_trial_dataframes(self) -> dict[str, Any]:
        return {}


def trials_of(where: str, files: pyarrow.fs.FileSystem | None) -> list[Trial]:
    """The trials of the run in this directory, each with its last result. files: its file system; None: as Ray finds.

    Raises what its storage raises, and ValueError if it is no run's directory.
    """
    return list(_WithoutResults(where, storage_filesystem=files).trials or ())


def search_of(where: str, files: pyarrow.fs.FileSystem | None) -> dict[str, Any] | None:
    """What the newest snapshot of the run has of its search (`extend_controller`); None: stock Ray Tune wrote it."""
    found: dict[str, Any] | None = newest_state(where, files)["runner_data"].get(SEARCH)
    return found


def newest_state(where: str, files: pyarrow.fs.FileSystem | None) -> dict[str, Any]:
    """The newest snapshot of the run in this directory; empty: it has none. Raises what its storage raises."""
    newest = _find_newest_experiment_checkpoint(where, files)
    return {} if newest is None else dict(json.loads(content_of(where, files, Path(newest).name)))


def content_of(where: str, files: pyarrow.fs.FileSystem | None, name: str) -> bytes:
    """The content of a file in the run's directory. Raises what its storage raises."""
    files, path = get_fs_and_path(where, files)
    with files.open_input_stream(f"{path}/{name}") as stream:
        return bytes(stream.readall())
