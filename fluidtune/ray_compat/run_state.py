"""The trials of a run, as Ray Tune has written them down, without the results that they have reported.

`ExperimentAnalysis` also makes a table of each trial's ``result.json``, which takes seconds where trials have reported
thousands of results.
"""

from __future__ import annotations

from typing import Any

import pyarrow.fs
from ray.tune import ExperimentAnalysis
from ray.tune.experiment import Trial


class _WithoutResults(ExperimentAnalysis):
    def _fetch_trial_dataframes(self) -> dict[str, Any]:
        return {}


def trials_of(where: str, files: pyarrow.fs.FileSystem | None) -> list[Trial]:
    """The trials of the run in this directory, each with its last result. files: its file system; None: as Ray finds.

    Raises what its storage raises, and ValueError if it is no run's directory.
    """
    return list(_WithoutResults(where, storage_filesystem=files).trials or ())
