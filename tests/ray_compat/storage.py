"""A trial's place in a run's storage, as Tune hands it to a trial, without Ray's cluster."""

from __future__ import annotations

from pathlib import Path

from ray.train._internal.storage import StorageContext


class TrialStorage(StorageContext):
    """The trial ``trial`` of the run ``run`` in this folder, with what Ray keeps in its session's directory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), "run", trial_dir_name="trial")
        self._session = str(folder / "session")

    def _get_session_path(self) -> str:
        return self._session
