"""Runs of one name that begin in one second stage their files apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.train._internal import storage

from fluidtune import FluidScheduler


def test_two_experiments_of_one_name_that_begin_in_one_second_share_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: two drivers of one cluster had each other's trials in their storages."""
    monkeypatch.setattr("ray.tune.utils.date_str", lambda: "2026-11-29_10-00-00")
    monkeypatch.setattr(storage, "_get_ray_train_session_dir", lambda: str(tmp_path))
    FluidScheduler()
    runs = [storage.StorageContext(str(tmp_path / name), "fluid") for name in "ab"]
    folders = {run.experiment_driver_staging_path for run in runs}
    assert len(folders) == 2 and all("/2026-11-29_10-00-00_" in folder for folder in folders)
