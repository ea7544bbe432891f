"""What is left of a clone that cannot be made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow.fs import LocalFileSystem
from ray.tune import Checkpoint

from fluidtune.ray_compat.cloning import clone_of


class Full(LocalFileSystem):  # type: ignore[misc]
    """It has room for what is copied, and for no further file."""

    def open_output_stream(self, *args: Any, **more: Any) -> Any:
        raise OSError("no space")


def test_a_clone_that_has_no_room_for_its_files_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "weights").write_text("1")
    there = tmp_path / "clone"
    trial: Any = SimpleNamespace(evaluated_params={}, trial_id="1", local_path=there, init_local_path=there.mkdir)
    trial.storage = SimpleNamespace(storage_filesystem=Full(), trial_fs_path=str(there))
    trial.latest_checkpoint_result = SimpleNamespace(checkpoint=Checkpoint(tmp_path / "last"), metrics={})
    trial.reset = lambda: trial
    with pytest.raises(OSError, match="no space"):
        clone_of(trial, {}, {}, from_checkpoint=True)
    assert not there.exists()
